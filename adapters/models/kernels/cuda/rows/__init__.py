"""Launches for a step of one row on a CUDA device: its experts, and their sum. Begin with `row_experts`.

May import from the folder above.
"""
