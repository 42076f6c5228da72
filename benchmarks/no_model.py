"""A shard that computes nothing, for benchmarks of everything except the model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.shard import Kept, ShardSpec
from adapters.models.kernels.step import Forward, Step
from adapters.sequence_layout import RowSpec

VOCABULARY = 256  # small, since an argmax is the model's work and not the engine's
MOST_REQUESTS = 64


SPEC = ShardSpec(
    layers=range(1),
    slots=MOST_REQUESTS,
    capacity=1 << 16,
    buckets=(256,),
    vocab_size=VOCABULARY,
    device=torch.device("cpu"),
    dtype=torch.float32,
)


class NoRows:
    """Rows that are nowhere."""

    spec = RowSpec((), 1, 1, "F32")
    is_addressable = True

    def copy(self, source: int, target: int, count: int) -> None:
        assert source != target
        assert count


@frozen
class StatelessLayers:
    """A shard without recurrent layers."""

    specs: tuple[()] = ()
    block: int = 64
    checkpoint_count: int = 0


@define
class NoModel:
    """A shard that computes nothing: the same hidden states and logits for everything.

    awaited: None, or a queue into which streams put an item for each token. Then a step begins once streams have read
    the tokens of all steps that were reported to the event loop before. decode_ns: processor time of the lane so far,
    at the beginning of each decode step.
    """

    spec: ShardSpec = SPEC
    awaited: SimpleQueue[None] | None = None
    rows: NoRows = field(factory=NoRows)
    states: StatelessLayers = StatelessLayers()
    decode_ns: list[int] = field(factory=list[int])
    _unread: deque[int] = field(factory=deque[int])  # rows of each decode step whose tokens are not waited for yet
    _hidden: Tensor = field(factory=lambda: torch.zeros(256, 8))
    _logits: Tensor = field(factory=lambda: torch.randn(MOST_REQUESTS, VOCABULARY))

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        assert len(inputs) == step.rows
        if len(step.segments) == step.rows:  # a prefill has one segment of several rows
            self.decode_ns.append(time.thread_time_ns())
            if self.awaited is not None:
                self._await_streams(self.awaited, step.rows)
        return Forward(self._hidden[: step.bucket], {})

    def _await_streams(self, awaited: SimpleQueue[None], rows: int) -> None:
        if len(self._unread) == 1 + self.spec.runs_ahead:
            for _ in range(self._unread.popleft()):
                awaited.get()
        self._unread.append(rows)

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        assert len(kept) == len(step.segments)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]

    def memory(self) -> dict[str, int]:
        return {"weights": 0}

    def synchronize(self) -> None:
        """It is never behind."""

    def close(self) -> None:
        self._logits = self._hidden
