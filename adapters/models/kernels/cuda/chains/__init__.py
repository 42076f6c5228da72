"""The choice among Hopper's kernels for attention of many rows, and their launches.

May import the kernels in `triton` and what describes their arguments.
"""
