"""Products in FP8 on Hopper: rows quantised to E4M3 in groups of 128 columns, and weights in E4M3 with blocks' scales.

Begin with `fp8_wide.py`. May import the kernels for all devices.
"""
