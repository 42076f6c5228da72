"""EAGLE-3: a draft of one layer that predicts one token after the other, from three layers of its target.

Begin with `draft.py`. May import `adapters.models.decoder` and `adapters.models.kernels`.
"""
