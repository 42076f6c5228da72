"""The prefix cache outside the device: KV blocks in host memory, on disk and in a shared store, found by
their tokens.

Begin with `store.py`. May import `effects`.
"""
