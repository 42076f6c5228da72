"""The operations that a backend has, as interfaces, and what they take.

Begin with `layer_interface.py`. May import steps and `functions`, and no backend.
"""
