"""What a slot of the device serves: its tokens, how many rows are valid, and its checkpoints of positional state.

Begin with `slots.py`. May import `lane` and `sampling`.
"""
