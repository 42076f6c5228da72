"""Folders with packed weights (FP8, AWQ, GPTQ, compressed-tensors), and rounding of weights that are not packed.

Begin with `quantisation_config.py`. Imports the other modules of `adapters.checkpoint`.
"""
