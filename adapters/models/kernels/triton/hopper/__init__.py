"""Triton kernels for compute capability 9.0, with the bits of the kernels for all devices.

Begin with `hopper_products.py`. May import the kernels for all devices.
"""
