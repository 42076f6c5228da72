"""Products of several rows with packed weights on CUDA, by how many rows there are.

Begin with `few_rows.py`. May import Triton's kernels and what `cuda/` has for launches.
"""
