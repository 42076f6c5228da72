"""Runs layers in steps of all buckets and compares the rows that come out, bit for bit. Used by the probe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.shard import Shard
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe_result import BLOCK_SIZE

_MAX_BOUNDARIES = 16
_NARROW = 8  # buckets up to this one mostly decode, so single rows are tried over every span
PROBED_SLOTS = 3
_FINGERPRINT_ROWS = 64


@frozen
class Computed:
    """The results of one segment: hidden rows `[n, D]`, and KV tensors `[KV, n, hd]`."""

    start: int
    hidden: Tensor
    kv: Mapping[str, Tensor]

    def part(self, start: int, stop: int) -> Computed:
        rows = slice(start - self.start, stop - self.start)
        return Computed(start, self.hidden[rows], {name: tensor[:, rows] for name, tensor in self.kv.items()})

    def tensors(self) -> list[Tensor]:
        return [self.hidden, *self.kv.values()]


def same_bits(ours: Computed, theirs: Computed) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(ours.tensors(), theirs.tensors(), strict=True)
    )


@define(eq=False)
class LayerBench:
    """Runs segments of one token sequence, whose earlier K and V rows are random, and compares what comes out."""

    shard: Shard
    hidden_size: int
    capacity: int
    vectors: Tensor | None = field(init=False, default=None)
    tokens: Tensor = field(init=False)
    broken: dict[int, str] = field(init=False, factory=dict)
    checks: int = field(init=False, default=0)
    fingerprint: str = field(init=False, default="")

    def __attrs_post_init__(self) -> None:
        shard = self.shard
        generator = make_generator(2)
        self.tokens = torch.randint(0, shard.spec.vocab_size, (self.capacity,), generator=generator)
        generator = make_generator(3, shard.spec.device)
        if shard.spec.layers.start:  # hidden states come in, one vector for each token of the vocabulary
            table = torch.empty(
                shard.spec.vocab_size, self.hidden_size, device=shard.spec.device, dtype=shard.spec.dtype
            )
            self.vectors = table.normal_(generator=generator)
        spec = shard.rows.spec
        assert isinstance(shard.rows, KvCache)
        layout = shard.rows.layout
        place = {"device": shard.spec.device, "dtype": shard.spec.dtype}
        heads = partial(torch.empty, (spec.heads, self.capacity, layout.head), **place)
        drawn = [
            tensor for _ in shard.rows.layers for tensor in layout.encode(lambda: heads().normal_(generator=generator))
        ]
        shard.rows.import_(0, 0, dict(zip(spec.names, drawn, strict=True)))
        for slot in range(1, PROBED_SLOTS):
            shard.rows.copy(0, slot, self.capacity)

    def compute(self, bucket: int, *segments: Segment) -> list[Computed]:
        """The rows of every segment; slots all hold the same sequence."""
        step = Step(segments, bucket)
        inputs = torch.cat([self.tokens[segment.start : segment.start + segment.count] for segment in segments])
        if self.vectors is not None:
            padding = inputs.new_zeros(bucket - len(inputs))
            inputs = self.vectors[torch.cat((inputs, padding)).to(self.vectors.device)]
        hidden = self.shard.forward(step, inputs).hidden
        found = []
        row = 0
        for segment in segments:
            rows = slice(row, row + segment.count)
            stop = segment.start + segment.count
            kv = self.shard.rows.export(segment.slot, segment.start, stop)
            found.append(Computed(segment.start, hidden[rows].clone(), kv))
            row += segment.count
        return found

    def run(self, tile: int, *, every: bool) -> int:
        """Check every bucket at key tile boundaries, `every` sampled one or the first and the last; returns how
        many."""
        rows = min(self.shard.spec.buckets[-1], self.capacity)
        last = self.capacity - rows
        at = [min(max(0, boundary - rows // 2), last) for boundary in boundaries(tile, self.capacity)]
        thorough = {0, *at[:1]}
        starts = dict.fromkeys([*sorted(thorough), last, *(at if every else ())])
        for start in starts:
            self.check_span(start, rows, tile, thorough=start in thorough)
        return len(starts)

    def check_span(self, start: int, rows: int, tile: int, *, thorough: bool) -> None:
        """Compare pieces of `[start, start + rows)` with the whole of it, computed as one chunk of C."""
        chunk = self.shard.spec.buckets[-1]
        [whole] = self.compute(chunk, Segment(0, start, rows))
        if not self.fingerprint:
            self._take_fingerprint(whole.part(start, start + min(rows, _FINGERPRINT_ROWS)))
        edge = min(max(start + 1, (start // tile + 1) * tile), start + rows - 1)
        for bucket in self.shard.spec.buckets:
            for at, count in pieces(start, rows, edge, bucket, thorough=thorough):
                if bucket in self.broken:
                    break
                [part] = self.compute(bucket, Segment(0, at, count))
                self._compare(bucket, "alone", whole, part)
            if thorough and bucket not in self.broken:
                self._check_batch(bucket, whole, start, rows, edge)
            if bucket in self.broken:
                self.shard.rows.import_(0, start, whole.kv)

    def _check_batch(self, bucket: int, whole: Computed, start: int, rows: int, edge: int) -> None:
        """Neighbours: segments of three slots in one step, each as it came out of the chunk."""
        count = max(1, min(bucket // PROBED_SLOTS, rows))
        ends = {start, min(edge, start + rows - count), start + rows - count}
        segments = [Segment(slot, at, count) for slot, at in enumerate(sorted(ends))]
        if sum(segment.count for segment in segments) > bucket:
            return
        for slot in range(1, PROBED_SLOTS):
            self.shard.rows.import_(slot, start, whole.kv)
        for part in self.compute(bucket, *segments):
            self._compare(bucket, "batched", whole, part)

    def _compare(self, bucket: int, how: str, whole: Computed, part: Computed) -> None:
        stop = part.start + len(part.hidden)
        self.checks += 1
        if bucket not in self.broken and not same_bits(whole.part(part.start, stop), part):
            chunk = self.shard.spec.buckets[-1]
            self.broken[bucket] = (
                f"bucket {bucket}: rows {part.start}..{stop - 1}, {how}, differ from a chunk of {chunk}"
            )

    def _take_fingerprint(self, rows: Computed) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in rows.tensors():
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        self.fingerprint = digest.hexdigest()

    def widths(self) -> set[int]:
        """The buckets at which a row is the same alone, in another place and among others."""
        at = self.capacity // 2
        other = self.capacity // 3
        found = set[int]()
        for bucket in self.shard.spec.buckets[:-1]:
            [alone] = self.compute(bucket, Segment(0, at, 1))
            neighbours = (Segment(1, other, 1), Segment(0, at, 1), Segment(2, at, 1))
            if bucket < len(neighbours):
                continue
            _, batched, _ = self.compute(bucket, *neighbours)
            if same_bits(alone, batched):
                found.add(bucket)
        return found


def boundaries(tile: int, capacity: int) -> list[int]:
    """Key tile boundaries up to the capacity, at most 16: all of them, or evenly many with the first and the last."""
    count = capacity // tile
    if count <= _MAX_BOUNDARIES:
        return [tile * index for index in range(1, count + 1)]
    spread = {round(1 + (count - 1) * index / (_MAX_BOUNDARIES - 1)) for index in range(_MAX_BOUNDARIES)}
    return [tile * index for index in sorted(spread)]


def pieces(start: int, rows: int, edge: int, bucket: int, *, thorough: bool) -> list[tuple[int, int]]:
    """(position, count) of the pieces of `[start, start + rows)` that a bucket computes; one straddles `edge`."""
    end = start + rows
    full = min(bucket, rows)
    straddling = min(max(start, edge - max(1, full // 2)), end - full)
    found = [(straddling, full)]
    if thorough or bucket <= _NARROW:
        found += [(edge, 1), (edge - 1, 1), (end - 1, 1)]
    if thorough:
        odd = max(1, full - 1)
        at = min(start + BLOCK_SIZE, end - 1)
        found += [(start, full), (end - odd, odd), (at, min(bucket, end - at))]
    return list(dict.fromkeys(found))
