"""What a model said in full: every number of the logits that tokens were picked from, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from attrs import define, field

from adapters.models.shard import Kept, Step
from engine.target import Target


@define(eq=False)
class Listening:
    """Digests of the logits of all rows that stayed, by position, in the order in which they came about."""

    target: Target
    rows: list[tuple[int, str]] = field(factory=list)
    last: tuple[Step, torch.Tensor] | None = None

    def __attrs_post_init__(self) -> None:
        shard = self.target.shard
        logits, commit = shard.logits, shard.commit

        def heard(step: Step, hidden: torch.Tensor) -> torch.Tensor:
            self.last = step, logits(step, hidden)
            return self.last[1]

        def kept(step: Step, staying: Sequence[Kept]) -> None:
            assert self.last is not None
            heard, found = self.last
            first = 0
            # Behind those that tokens were picked from there may be a prompt's rows, of which nobody asked for any.
            for part, keep in zip(heard.parts, staying, strict=False):
                for at, row in enumerate(range(keep) if isinstance(keep, int) else keep):
                    digest = hashlib.blake2b(found[first + row].cpu().numpy().tobytes(), digest_size=8).hexdigest()
                    self.rows.append((part[0].start + at, digest))
                first += sum(segment.count for segment in part)
            commit(step, staying)

        shard.logits, shard.commit = heard, kept  # type: ignore[method-assign]

    def taken(self) -> list[tuple[int, str]]:
        found, self.rows = self.rows, []
        return found
