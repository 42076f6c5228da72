"""One device and what it carries out: the lane, the slots on it, and how tokens are picked from logits.

Begin with `executor.py`, then `decode/decode_step.py`. Packages, from top to bottom as they import each other:
`decode/` (forwards of a launch), `speculation/` (proposals, and what stays of them), `compression/` (scores of
prompts), `slots/` (what each slot holds), `sampling/` (the token of a row), `lane/` (the thread).
"""
