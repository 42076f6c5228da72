"""The keyword arguments of a call that is routed: the ingress gives them to the router of replicas.

* `route`: the `RouteKeys` of the prompt, or None where it could not be read.
* `in_flight`: a mapping from the id of a replica to the requests of this ingress that the replica is answering. Serve
  cannot count them, because answers do not pass through Serve's own calls.
* `avoid`: the ids of replicas that have failed this request, or that could not be reached just now.
* `on_decision`: a function that the router calls with its `RouteDecision`, in the same process and event loop.

The id of a replica is `RunningReplica.replica_id.unique_id`.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class RouteKeys:
    """The keys of one prompt.

    keys: of its whole blocks in order, as the store of a replica computes them (`adapters/store/block_keys.py`).
    block_size: tokens of a block. tokens: of the whole prompt. session: the conversation that the caller named, if any.
    salt: what keeps the caller's prefixes apart from others'; it is part of every key already.
    """

    keys: tuple[bytes, ...]
    block_size: int
    tokens: int
    session: str | None = None
    salt: str = ""
