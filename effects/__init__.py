"""The language between the pure core and the world: what can be asked, and what can come back.

Every module here is plain data. An effect is imperative and lists its possible outcomes; an outcome is past tense and
says what really happened. Effects carry names (slots, leases, spans), never tensors. Imports nothing of ours.
"""
