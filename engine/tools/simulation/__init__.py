"""Simulates requests under other cache policies: the real fold, index and policies run on a virtual clock.

Begin with `simulate_scope.py`. May import `core` and `settings`.
"""
