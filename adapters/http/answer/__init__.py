"""Answers on their way out: token streams become text and calls, and responses whole or streamed.

Begin with `reply.py`. May import `request`, `history` and `wire`.
"""
