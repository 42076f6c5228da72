"""The probe of a layer with recurrent state: its rows, and the state behind them, are the same in whatever pieces.

Unlike rows of a cache, a state cannot be begun anywhere: every trial starts where a chunk does, from no state and from
the one that a chunk left, and goes over all rows of the next chunk, settled at once or row by row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.shard import Shard
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe_result import BLOCK_SIZE

_NARROW = 16  # buckets up to this one go over fewer rows
_NEAR = 80  # as many, across a multiple of 64


@frozen
class Settled:
    """What rows gave, `[n, D]`, and the state that they left."""

    hidden: Tensor
    state: Mapping[str, Tensor]


@define(eq=False)
class StateBench:
    """A shard of one recurrent layer, with three slots and a place, and what of it does not agree."""

    shard: Shard
    capacity: int
    tokens: Tensor = field(init=False)
    broken: dict[int, str] = field(init=False, factory=dict)
    checks: int = field(init=False, default=0)
    fingerprint: str = field(init=False, default="")
    _kept: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        generator = make_generator(2)
        self.tokens = torch.randint(0, self.shard.spec.vocab_size, (self.capacity,), generator=generator)

    @property
    def chunk(self) -> int:
        return self.shard.spec.buckets[-1]

    def run(self) -> int:
        """Check every bucket, from behind a chunk, if there is room for another one; returns from how many starts."""
        start = self.chunk if self.capacity > self.chunk else 0
        most = min(self.chunk, self.capacity - start)
        whole = self.compute(0, start, self.chunk, most, most)
        near = self.compute(0, start, self.chunk, min(_NEAR, most), most)
        self._take_fingerprint(whole)
        for bucket in self.shard.spec.buckets:
            rows, reference = (min(_NEAR, most), near) if bucket <= _NARROW else (most, whole)
            sizes = {bucket, max(1, bucket - 1), *((1,) if bucket == self.shard.spec.buckets[0] else ())}
            for count in sorted(sizes):
                if bucket not in self.broken:
                    found = self.compute(1, start, bucket, rows, count)
                    self._compare(bucket, reference, found, f"by {count}")
                    self._compare(bucket, Settled(whole.hidden[:rows], found.state), found, f"by {count}")
            if bucket not in self.broken:
                self._check_batch(bucket, whole, start)
        return 1

    def compute(self, slot: int, start: int, bucket: int, rows: int, count: int) -> Settled:
        """So many rows from the start of a chunk on, by `count`. What may be rolled back is, once."""
        if start:
            self._chunk_before(slot)
        found = []
        for at in range(start, start + rows, count):
            part = min(count, start + rows - at)
            step = Step((Segment(slot, at, part),), bucket, rows_only=part > BLOCK_SIZE)
            if 1 < part <= _NARROW:
                self._forward(step)
                self.shard.commit(step, [0])
            found.append(self._forward(step)[:part].clone())
            if not step.rows_only:
                self.shard.commit(step, [part])
        return Settled(torch.cat(found), self.shard.states.export(slot))

    def _chunk_before(self, slot: int) -> None:
        """Computed once, and kept: what goes on from a place goes on from what was put there."""
        if self._kept:
            self.shard.states.load(0, slot)
            return
        self._forward(Step((Segment(slot, 0, self.chunk),), self.chunk, rows_only=True))
        self.shard.states.keep(slot, 0)
        self._kept = True

    def _forward(self, step: Step) -> Tensor:
        return self.shard.forward(step, torch.cat([self._inputs(segment) for segment in step.segments])).hidden

    def _inputs(self, segment: Segment) -> Tensor:
        return self.tokens[segment.start : segment.start + segment.count]

    def _compare(self, bucket: int, whole: Settled, part: Settled, how: str) -> None:
        self.checks += 1
        same = same_bits(whole.hidden, part.hidden) and all(
            same_bits(whole.state[name], tensor) for name, tensor in part.state.items()
        )
        if not same:
            self.broken[bucket] = f"bucket {bucket}: rows {how} of a recurrent layer differ from a chunk's"

    def _check_batch(self, bucket: int, whole: Settled, start: int) -> None:
        """Neighbours: three slots at different rows of the same chunk."""
        count = min(max(1, bucket // 3), BLOCK_SIZE, max(1, len(whole.hidden) // 3))
        firsts = [start + number * count for number in range(3)]
        for slot, first in enumerate(firsts):
            if start:
                self._chunk_before(slot)
            if first > start:
                self._forward(Step((Segment(slot, start, first - start),), self.chunk, rows_only=True))
        step = Step(tuple(Segment(slot, first, count) for slot, first in enumerate(firsts)), bucket)
        if step.rows > bucket or firsts[-1] + count > start + len(whole.hidden):
            return
        hidden = self._forward(step)[: step.rows]
        self.checks += 1
        if not same_bits(hidden, whole.hidden[: 3 * count]):
            self.broken[bucket] = f"bucket {bucket}: rows of a recurrent layer differ beside those of other slots"

    def _take_fingerprint(self, whole: Settled) -> None:
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=8)
        for tensor in (whole.hidden[:BLOCK_SIZE], *whole.state.values()):
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        self.fingerprint = digest.hexdigest()

    def widths(self) -> set[int]:
        """The buckets at which a row is the same alone and among others."""
        found = set[int]()
        for bucket in self.shard.spec.buckets[:-1]:
            alone = self._forward(Step((Segment(0, 0, 1),), bucket))[:1].clone()
            beside = self._forward(Step((Segment(1, 0, 2), Segment(0, 0, 1)), bucket))[2:3]
            if same_bits(alone, beside):
                found.add(bucket)
        return found


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
