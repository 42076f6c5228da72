"""Kernels of Hopper for few rows over coded keys and values. `coded_rows` attends with single rows. Those for many rows
are in `hopper_codes`.

May import from the folders above.
"""
