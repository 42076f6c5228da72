"""Kernels for CUDA devices: launches of the programs in `triton/`, their compilation and CUDA graphs.

Begin with `kernels.py`. May import `triton` and the interfaces of `kernels`.
"""
