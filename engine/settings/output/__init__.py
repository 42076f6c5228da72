"""Output of commands: numbers, logs, progress, pictures and the figures of a running server.

Begin with `progress.py`. May import `user_error.py`.
"""
