"""Triton's kernels compiled before their first launch, by worker processes, and found again.

Begin with `compiler.py`. Imports no launches.
"""
