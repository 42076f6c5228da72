"""The formats of cached rows and of packed weights.

Begin with `row_format.py`. Imports no other kernels.
"""
