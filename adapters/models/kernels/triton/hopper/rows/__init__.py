"""Kernels of Hopper's for a step of one row: attention with a window, and experts whose weights stay packed.

Start with `row_experts`. Sums have the order of those in the kernels for more rows, so the bits are the same.
"""
