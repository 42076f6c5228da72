"""Clients that are not Python's, run by hand: they are installed from their registry."""
