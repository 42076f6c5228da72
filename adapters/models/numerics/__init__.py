"""The proof that the bits of a row do not depend on how it was computed, and random weights to try it with.

Begin with `probe.py`. May import every other package of the models.
"""
