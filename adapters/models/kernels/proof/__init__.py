"""Proves which row counts of every product give the same bits on this machine.

Begin with `prover.py`. Knows the kernels that it tries by the interface in `multiplier.py` alone.
"""
