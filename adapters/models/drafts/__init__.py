"""Draft models: what all of them share, and one room for each kind.

Begin with `cached_draft.py`. May import `decoder` and `kernels`.
"""
