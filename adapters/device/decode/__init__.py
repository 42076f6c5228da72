"""Forwards of a launch: prefill chunks and decode steps, alone, in batches, overlapped or in one native call.

Begin with `decode_step.py`. May import every other package of the device.
"""
