"""Folders whose weights are packed (FP8, AWQ, GPTQ, compressed-tensors), and packing those that are not."""
