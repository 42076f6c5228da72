"""The asking end: shards, drafts and scorers that live in a daemon, as the engine sees them.

Begin with `peer.py`. May import `protocol`.
"""
