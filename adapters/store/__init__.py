"""The prefix cache outside the device: KV blocks in host memory and on disk, found by their tokens.

Begin with `store.py`. May import `effects`.
"""
