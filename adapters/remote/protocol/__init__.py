"""The protocol between a server and a shard's daemon: handshake, frames, messages and tensors.

Begin with `channel.py` and docs/SHARD_PROTOCOL.md. Imports neither `client` nor `daemon`.
"""
