"""The vocabulary between the pure core and the executors: effects that can be asked for, and their outcomes.

Every module here is plain data. The name of an effect is imperative (`RunPrefill`), and its class lists the possible
outcomes. The name of an outcome is past tense (`PrefillAdvanced`), and it says what really happened. Effects carry
names of things (slots, leases, spans) and never tensors. The package imports nothing of ours.

Begin with `decode.py` for one effect, `all.py` for the list of them, and `ports.py` for the interfaces that the
executors and the HTTP server use.
"""
