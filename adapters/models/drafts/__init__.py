"""Draft models: the base class of all of them, and one folder for each kind.

Begin with `cached_draft.py`. May import `decoder` and `kernels`.
"""
