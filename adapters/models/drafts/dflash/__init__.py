"""DFlash drafts: block diffusion after context rows that are computed from the target's hidden states.

Begin with `draft.py`. May import `adapters.models.decoder` and `adapters.models.kernels`.
"""
