"""The memory of the edge between requests: answers, responses and shortened messages, in memory and in files.

Begin with `persistent_lru.py`. May import `wire`.
"""
