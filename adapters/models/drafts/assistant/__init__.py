"""Assistants of Gemma 4: small models that read the rows of their target. Begin with `draft.py`.

May import `decoder`, `families` and `kernels`.
"""
