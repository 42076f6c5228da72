"""Models of our families in GGUF files.

The modules know the names that llama.cpp gives to settings and tensors, and the changes that its converter makes to
tensors. Begin with `open_gguf.py`. May import `families`, `decoder`, `kernels` and `adapters.checkpoint`.
"""
