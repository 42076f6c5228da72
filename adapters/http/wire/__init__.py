"""Connections, bodies and errors: everything below a parsed request.

Begin with `connection.py`. Imports no other package of the edge but its options.
"""
