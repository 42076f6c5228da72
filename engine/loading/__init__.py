"""From known options to a model that can serve: devices, memory, weights, drafts, calibration, the store.

Begin with `load_target.py`. May import `settings`.
"""
