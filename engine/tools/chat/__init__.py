"""`rekindle chat`: a conversation in a terminal with any OpenAI-compatible server, by default with ours.

Begin with `chat_loop.py`.
"""
