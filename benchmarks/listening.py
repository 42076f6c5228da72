"""Records everything that a model said: every number of the logits that tokens were picked from, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from attrs import define, field

from adapters.device.decode.native_decode import FusedStep, NativeDecodeStep, NativeStepResult
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposer import LocalDraft, Proposer
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Step
from effects.ids import Tokens
from engine.loading.load_target import LoadedModel


@define(eq=False)
class Listening:
    """Digests of the logits of all rows that stayed, by position, in the order in which they came about."""

    target: LoadedModel
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
            # Behind the rows that tokens were picked from there may be rows of a prompt. Their logits are not needed.
            for part, keep in zip(heard.parts, staying, strict=False):
                for at, row in enumerate(range(keep) if isinstance(keep, int) else keep):
                    self.rows.append((part[0].start + at, digest(found[first + row])))
                first += sum(segment.count for segment in part)
            commit(step, staying)

        shard.logits, shard.commit = heard, kept  # type: ignore[method-assign]
        self.attach()

    def attach(self) -> None:
        """Listen to the steps that the target's executor takes in one call. Again, where it has a new executor."""
        decoding = self.target.executor.decoding
        if decoding.native is not None:
            decoding.native = HeardRounds(decoding.native.shard, decoding.native.buckets, self.rows)

    def taken(self) -> list[tuple[int, str]]:
        found = list(self.rows)
        self.rows.clear()
        return found


@define(eq=False)
class HeardRounds(NativeDecodeStep):
    """Decode steps in one call, whose logits are recorded as well. rows: as in `Listening`."""

    rows: list[tuple[int, str]]
    _heard: FusedStep | None = field(init=False, default=None)

    def find_fused_step(self, draft: LocalDraft | None, count: int) -> FusedStep | None:
        self._heard = super().find_fused_step(draft, count)
        return self._heard

    def step(
        self, slot: int, state: SlotState, most: int, proposer: Proposer | None, copies: Tokens = ()
    ) -> NativeStepResult | None:
        taken = super().step(slot, state, most, proposer, copies)
        if taken is not None and self._heard is not None:
            logits = self._heard.native.target.logits  # type: ignore[attr-defined] # a `NativeRound`
            self.rows += [(state.valid + at, digest(logits[at])) for at in range(len(taken.tokens))]
        return taken


def digest(row: torch.Tensor) -> str:
    return hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=8).hexdigest()
