"""Shards in other processes: what crosses to them, who serves there, and how the server asks them."""
