"""`rekindle serve` and `rekindle shard`: the wiring of executors, the start, the end, and re-execution of traces.

Begin with `serve.py`, then `wiring.py`. May import `core`, `loading` and `settings`.
"""
