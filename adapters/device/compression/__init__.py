"""Prompt compression on the device: scoring a prompt and choosing the tokens that stay.

Begin with `score_prompt.py`. May import `lane` and `sampling`.
"""
