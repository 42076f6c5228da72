"""One device and what it carries out: the lane, the slots on it, and how tokens are picked from logits."""
