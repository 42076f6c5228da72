"""A decoder of any family: its layers, caches, forwards and the shard interface that the engine drives.

Begin with `shard.py` (the interface), then `dense_shard.py`. May import `kernels`.
"""
