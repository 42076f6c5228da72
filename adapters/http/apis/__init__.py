"""One or two modules for each API: how its requests are read and how its answers look.

Begin with `api.py`, then `openai_chat.py`. May import every package but `page`.
"""
