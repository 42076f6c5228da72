"""The probe of a layer with recurrent state: its rows and its state have the same bits, however the rows are split.

A forward cannot start from any row, because there is only one state. So every trial starts where a chunk does: at row 0
without a state, or behind a first chunk. It computes the rows of that chunk in pieces of some size, down to single
rows, and compares them and the state with those of the whole chunk.
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

_NARROW = 16  # buckets up to this one compute only the first `_NEAR` rows of a chunk
_NEAR = 80  # rows, so that a multiple of 64 is crossed


@frozen
class Settled:
    """Results of rows, `[n, D]`, and the state behind them."""

    hidden: Tensor
    state: Mapping[str, Tensor]


@define(eq=False)
class StateBench:
    """The trials of one recurrent layer, in a shard with three slots and a place.

    broken: buckets whose rows or states differ, and why.
    """

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
        """Check every bucket, behind a first chunk if there is room for another one. Return the number of starts: 1."""
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
                    self._compare(bucket, reference, found, count)
                    self._compare(bucket, Settled(whole.hidden[:rows], found.state), found, count)
            if bucket not in self.broken:
                self._check_batch(bucket, whole, start)
            if bucket not in self.broken and bucket >= 2 * BLOCK_SIZE and self.shard.states.commits_per_segment:
                self._check_mixed(bucket, whole, start)
        return 1

    def compute(self, slot: int, start: int, bucket: int, rows: int, count: int) -> Settled:
        """Compute `rows` rows from the start of a chunk on, in pieces of `count` rows.

        Small pieces are computed, rolled back and computed again, because serving does that with rejected proposals.
        """
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
        """Bring the slot behind a first chunk. It is computed once, and kept in the checkpoint for later trials."""
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

    def _compare(self, bucket: int, whole: Settled, part: Settled, piece_size: int) -> None:
        self.checks += 1
        same = same_bits(whole.hidden, part.hidden) and all(
            same_bits(whole.state[name], tensor) for name, tensor in part.state.items()
        )
        if not same:
            self.broken[bucket] = f"bucket {bucket}: rows by {piece_size} of a recurrent layer differ from a chunk's"

    def _check_batch(self, bucket: int, whole: Settled, start: int) -> None:
        """Check that rows do not depend on other slots in their step: three slots at different rows of one chunk."""
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
            self.broken[bucket] = f"bucket {bucket}: rows of a recurrent layer differ next to those of other slots"

    def _check_mixed(self, bucket: int, whole: Settled, start: int) -> None:
        """Check rows of a prompt that settle in a step with single rows of two slots that may be rolled back."""
        count = min(bucket - 2, len(whole.hidden))
        firsts = {0: start + 5, 2: start + BLOCK_SIZE + 6}
        if count <= BLOCK_SIZE + 6:
            return
        alone = self.compute(1, start, bucket, count, count)
        for slot in range(3):
            if start:
                self._chunk_before(slot)
            if slot in firsts:
                before = Segment(slot, start, firsts[slot] - start)
                self._forward(Step((before,), self.chunk, rows_only=True))
        segments = Segment(0, firsts[0], 1), Segment(1, start, count), Segment(2, firsts[2], 1)
        step = Step(segments, bucket)
        hidden = self._forward(step)[: step.rows].clone()
        self.shard.commit(step, [0, count, 0])
        rows = [firsts[0] - start, *range(count), firsts[2] - start]
        self._compare(
            bucket, Settled(whole.hidden[rows], alone.state), Settled(hidden, self.shard.states.export(1)), count
        )

    def _take_fingerprint(self, whole: Settled) -> None:
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=8)
        for tensor in (whole.hidden[:BLOCK_SIZE], *whole.state.values()):
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        self.fingerprint = digest.hexdigest()

    def widths(self) -> set[int]:
        """Return the buckets at which a row has the same bits alone and next to rows of another slot."""
        found = set[int]()
        for bucket in self.shard.spec.buckets[:-1]:
            neighbours = Step((Segment(1, 0, 2), Segment(0, 0, 1)), bucket)
            if bucket < neighbours.rows:
                continue
            alone = self._forward(Step((Segment(0, 0, 1),), bucket))[:1].clone()
            batched = self._forward(neighbours)[2:3]
            if same_bits(alone, batched):
                found.add(bucket)
        return found


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
