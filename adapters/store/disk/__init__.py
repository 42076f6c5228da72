"""The disk tier: its folder, its files by name, their journals, and what a survey finds there.

Begin with `disk_tier.py`. May import the index, recent prompts and `files`.
"""
