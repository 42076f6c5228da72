"""The choice among Hopper's kernels for attention of many rows.

May import the kernels in `triton` and what describes their arguments.
"""
