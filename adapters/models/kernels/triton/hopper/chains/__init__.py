"""Attention of many rows on Hopper, in kernels for one kind of rows each. `hopper_chain` serves the other kinds.

A module may import the rooms that `hopper` may, and `hopper` itself.
"""
