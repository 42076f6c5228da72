"""Rows and positional states of slots in tensors: keys and values, windows, states of recurrent layers.

Begin with `kv_cache.py`. May import `shard.py` and the kernels.
"""
