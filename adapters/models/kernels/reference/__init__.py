"""Plain torch kernels: slow, short, and what the fast ones are tested against.

Begin with `kernels.py`.
"""
