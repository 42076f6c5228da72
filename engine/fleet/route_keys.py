"""What the ingress tells the router of a prompt: the block keys by which replicas tell what they hold."""

from __future__ import annotations

from attrs import frozen


@frozen
class RouteKeys:
    """The keys of one prompt, as the keyword argument `route` of a call that is routed.

    keys: of its whole blocks in order, as the store of a replica computes them (`adapters/store/block_keys.py`).
    block_size: tokens of a block. tokens: of the whole prompt. session: the conversation that the caller named, if any.
    salt: what keeps the caller's prefixes apart from others'; it is part of every key already.
    """

    keys: tuple[bytes, ...]
    block_size: int
    tokens: int
    session: str | None = None
    salt: str = ""
