"""Moves rows and positional state between slots and the store, which has them in host memory, on disk, or shared.

Begin with `saver.py` (the way out) and `restorer.py` (the way back). Both stand on `fence.py` and `copy_rows.py`.
"""
