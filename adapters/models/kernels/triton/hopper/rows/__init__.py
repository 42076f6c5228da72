"""Kernels of Hopper's for a step of one row: attention with a window, and experts whose weights stay packed.

Start with `row_experts`. Sums are those of the kernels for more rows, in the same order, so the bits are theirs, too.
"""
