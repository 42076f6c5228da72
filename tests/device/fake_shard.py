"""A shard whose logits are a digest of everything before them: a wrong row, slot, copy or order changes them all.

A cached row holds `mix(token, position)`. A row's hidden state is the digest of the sum of all rows up to its own. So
it is exact at any row count and in any batch, like proven buckets. What no caller may rely on is filled with garbage.
Its auxiliary hidden states are the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.models.decoder.shard import Kept, NamedTensors, ShardSpec
from adapters.models.kernels.step import Forward, Step
from adapters.sequence_layout import RowSpec, TensorSpec

A, B, C = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 29)) * B
    x = (x ^ (x >> 32)) * C
    return x ^ (x >> 31)


def row_of(tokens: Tensor, positions: Tensor) -> Tensor:
    return mix(tokens * A + positions * B + C)


def logits_of(hidden: Tensor, vocab: int) -> Tensor:
    """int64 `[R, 1]` -> float32 `[R, V]`, in [-4, 4)"""
    bits = mix(hidden + torch.arange(vocab) * A)
    return (bits >> 40).float() / 2**21


VOCAB, CPU = 97, torch.device("cpu")
ROWS = RowSpec(("layers.0.k",), 1, 1, "I64")


SPEC = ShardSpec(
    layers=range(1),
    slots=4,
    capacity=256,
    buckets=(4, 8, 16, 32),
    vocab_size=VOCAB,
    device=CPU,
    dtype=torch.int64,
)


@define(eq=False)
class FakeRows:
    """The rows of a fake shard. What a copy leaves behind the copied rows is garbage."""

    cache: Tensor
    rubbish: Callable[[], int]
    spec: RowSpec = ROWS
    is_addressable: bool = False
    copies: list[tuple[int, int, int]] = field(factory=list)

    def copy(self, source: int, target: int, count: int) -> None:
        self.copies.append((source, target, count))
        self.cache[target, :count] = self.cache[source, :count]
        self.cache[target, count:] = self.rubbish()

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        return {"layers.0.k": self.cache[slot, start:stop].clone()}

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        part = rows["layers.0.k"]
        self.cache[slot, start : start + len(part)] = part


@frozen
class NoStates:
    """A shard without recurrent layers."""

    specs: tuple[TensorSpec, ...] = ()
    block: int = 64
    checkpoint_count: int = 0
    commits_per_segment: bool = True
    survives_failure: bool = True
    tree_obstacle: str = ""


@define(eq=False)
class FakeShard:
    spec: ShardSpec = SPEC
    states: NoStates = NoStates()
    steps: list[Step] = field(factory=list)
    closed: bool = False
    cache: Tensor = field(init=False)
    rows: FakeRows = field(init=False)
    garbage: int = 1
    unsettled: Step | None = None
    written: Tensor = field(init=False)
    # By slot the last row of a step, which a commit may have left out. A later commit of this row alone keeps it.
    aside: dict[int, tuple[int, int]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.cache = torch.randint(-(2**60), 2**60, (self.spec.slots, self.spec.capacity))
        self.rows = FakeRows(self.cache, self.rubbish)

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        assert step.bucket in self.spec.buckets, step
        assert 0 < step.rows <= step.bucket, step
        assert inputs.shape == (step.rows,)
        assert len({part[0].slot for part in step.parts}) == len(step.parts)
        if self.unsettled is not None:  # never committed, so it has not happened
            self.commit(self.unsettled, [0] * len(self.unsettled.parts))
        self.steps.append(step)
        hidden, self.written = torch.full((2, step.bucket), self.rubbish()).unbind()
        row = 0
        for segment in step.segments:
            self.aside.pop(segment.slot, None)
            stop = segment.start + segment.count
            assert stop <= self.spec.capacity, step
            positions = torch.arange(segment.start, stop)
            rows = self.cache[segment.slot]
            rows[segment.start : stop] = row_of(inputs[row : row + segment.count], positions)
            self.written[row : row + segment.count] = rows[segment.start : stop]
            rows[stop:] = self.rubbish()
            hidden[row : row + segment.count] = mix(rows.cumsum(0)[segment.start : stop])
            row += segment.count
        self.unsettled = None if step.rows_only else step
        return Forward(hidden.unsqueeze(1), {0: self.written.unsqueeze(1)})

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        if step != self.unsettled:
            [segment] = step.segments
            assert list(kept) == [1]
            position, row = self.aside.pop(segment.slot)
            assert position == segment.start
            self.cache[segment.slot, position] = row
            return
        self.unsettled, first = None, 0
        for part, keep in zip(step.parts, kept, strict=True):
            path = [first + row for row in (range(keep) if isinstance(keep, int) else keep)]
            rows, start = self.cache[part[0].slot], part[0].start
            rows[start : start + len(path)] = self.written[path]
            rows[start + len(path) :] = self.rubbish()
            first += sum(segment.count for segment in part)
            last = part[-1]
            self.aside[last.slot] = last.start + last.count - 1, int(self.written[first - 1])

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        return logits_of(hidden, self.spec.vocab_size)

    def rubbish(self) -> int:
        self.garbage = self.garbage * 48271 % (2**31 - 1)
        return self.garbage * 2**30 + self.garbage

    def synchronize(self) -> None:
        """Nothing runs ahead here."""

    def memory(self) -> Mapping[str, int]:
        return {"weights": 0, "host": 0, "kv": self.cache.nbytes, "buffers": 0}

    def close(self) -> None:
        self.closed = True


def make_fake_shard(**facts: Any) -> FakeShard:
    """Return a fake shard whose spec differs from the usual one in these facts."""
    return FakeShard(evolve(SPEC, **facts))
