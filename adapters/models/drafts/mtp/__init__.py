"""A model's own prediction head (`mtp.*`) as a draft: one attention layer that predicts one token after the other.

Begin with `draft.py`. May import `adapters.models.decoder` and `adapters.models.kernels`.
"""
