"""One module for each model family: its configuration, its tensors and its layers.

Begin with `qwen3.py`. May import `decoder` and `kernels`.
"""
