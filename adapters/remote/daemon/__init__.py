"""The serving end: layers, a draft or a prompt scorer in a process of their own.

Begin with `daemon.py`. May import `protocol`.
"""
