"""Drafts: found by name, loaded, and attached to a target.

Begin with `find_draft.py`. May import `memory`.
"""
