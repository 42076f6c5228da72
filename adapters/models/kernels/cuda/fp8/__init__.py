"""Products in FP8 on CUDA: how their weights lie on the device, and their launches.

Begin with `fp8_products.py`. May import Triton's kernels and what `cuda/` has for launches.
"""
