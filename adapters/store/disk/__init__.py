"""The disk tier: its folder, its files by name, their journals, what a survey finds there, and what is damaged.

Begin with `disk_tier.py`. May import the index, recent prompts and `files`.
"""
