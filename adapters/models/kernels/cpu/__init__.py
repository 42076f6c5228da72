"""Kernels for CPUs: the compiled library (`native/`) where it is built, oneDNN and torch elsewhere.

Begin with `kernels.py`. May import `proof` and the interfaces of `kernels`.
"""
