"""Numeric functions that all backends share, and that give the same bits on every processor.

Begin with `exact_functions.py`, the constants of exp, log and noise. It imports no other package of the kernels.
"""
