"""From logits to tokens: penalties, truncation, noise and draws, with the same bits on hosts and GPUs.

Begin with `sampler.py`. Imports no other room of the device.
"""
