"""Text: the tokenizer, the chat template, how a conversation becomes a prompt, and how tokens become text again.

Begin with `model_text.py`, which holds all of it for one checkpoint. Imports effects and `adapters.checkpoint`.
"""
