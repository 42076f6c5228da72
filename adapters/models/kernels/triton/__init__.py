"""Triton kernels for CUDA devices: matrix products, attention and row-wise operations, exact by construction."""
