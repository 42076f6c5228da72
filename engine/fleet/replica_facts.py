"""The facts of a replica, which it tells once when it is ready. Ray Serve hands them to the ingress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cattrs
from attrs import asdict, frozen


@frozen
class ReplicaFacts:
    """The facts of one replica.

    url: of its HTTP server, within the cluster. identity, block_size: from them and the tokens follow its block keys.
    model_id, max_ctx, vocab: as its HTTP server has them. slots: sequences at once. paths: that its server answers.
    folder: that it has claimed for its prefix cache; empty if there is none. pid: of its server. Both are of its own
    machine.
    """

    url: str
    identity: str
    block_size: int
    model_id: str
    max_ctx: int
    vocab: int
    slots: int
    paths: tuple[str, ...]
    folder: str = ""
    pid: int = 0

    @staticmethod
    def from_answers(
        url: str, props: Mapping[str, Any], about: Mapping[str, Any], listed: Mapping[str, Any]
    ) -> ReplicaFacts:
        """Return the facts from the answers to `/props`, `/` and `/v1/models`."""
        model = listed["data"][0]
        return ReplicaFacts(
            url=url,
            identity=props["model"]["identity"],
            block_size=props["settings"]["block_size"],
            model_id=model["id"],
            max_ctx=model["context_length"],
            vocab=model["meta"]["n_vocab"],
            slots=props["total_slots"],
            paths=tuple(about["endpoints"]),
        )

    def to_metadata(self) -> dict[str, Any]:
        """Return the facts as Ray Serve carries them."""
        return asdict(self)

    @staticmethod
    def from_metadata(metadata: Mapping[str, Any]) -> ReplicaFacts:
        """Return the facts that Ray Serve has carried."""
        return cattrs.structure(metadata, ReplicaFacts)
