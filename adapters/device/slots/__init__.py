"""The state of each slot of the device: its tokens, how many rows are valid, and its checkpoints of positional state.

Begin with `slots.py`. May import `lane` and `sampling`.
"""
