"""Moves rows and positional state between slots, host memory and disk."""
