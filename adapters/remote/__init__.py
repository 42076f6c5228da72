"""Shards, drafts and prompt scorers in other processes.

Begin with `protocol/` (what crosses), then `client/` (how the server asks) and `daemon/` (who answers there).
"""
