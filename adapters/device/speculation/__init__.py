"""Proposals of a draft and how far the target accepts them.

Begin with `proposer.py`, then `drafting.py`. May import `slots`, `compression`, `lane` and `sampling`.
"""
