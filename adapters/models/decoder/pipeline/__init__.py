"""Several shards that run as one.

Begin with `pipeline.py`. Imports only the interface of a shard.
"""
