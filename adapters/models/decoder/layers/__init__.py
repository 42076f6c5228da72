"""The layers of a decoder: their tensors by published names, their products, their weights, and how they run.

Begin with `decoder_layer.py`. May import `cache`.
"""
