"""A running server: the event loop that folds events, submission, traces, replay and what is measured.

Begin with `event_loop.py`. May import `settings`.
"""
