"""The configuration of a decoder, and what it says of tensors, products and the probe.

Begin with `dense_config.py`. May import `layers` and `cache`.
"""
