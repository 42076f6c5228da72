"""Kernels of Hopper over coded keys and values. `coded_rows` attends with single rows. `unpack_codes` and
`unpacked_chain` serve a chunk of one slot, and `hopper_codes` serves other steps of many rows.

May import from the folders above.
"""
