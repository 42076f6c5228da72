"""The plan of one step on a CPU, which its layers share: where rows attend, and the angles of their positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.formats.row_format import as_bytes, format_of
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.layer_interface import Rope
from adapters.models.kernels.step import Segment
from adapters.models.kernels.step_batch import Batch, BlockBatch


@frozen
class ScoreMask:
    """A mask `[rows or 1, 1, n]` that is added to the scores of the n keys from `key` on: 0 where a row sees them,
    else -inf.
    """

    key: int
    scores: Tensor


@frozen
class Span:
    """Rows that attend together to the keys `[first, stop)`: those of `segment`, which begin at `row` of the batch."""

    segment: Segment
    row: int
    first: int
    stop: int
    masks: tuple[ScoreMask, ...]


@define(eq=False)
class StepPlan:
    """The plan of one step that its layers share. Its parts are made when the first layer asks for them."""

    segments: tuple[Segment, ...]
    _angles: dict[int, tuple[Tensor, Tensor]] = field(init=False, factory=dict)  # by the identity of their tables
    _spans: dict[AttentionMask | int, list[Span]] = field(init=False, factory=dict)
    _seen: dict[AttentionMask, tuple[Tensor, Tensor]] = field(init=False, factory=dict)
    _nearest: dict[int, Tensor] = field(init=False, factory=dict)

    @cached_property
    def segments_with_rows(self) -> list[tuple[int, Segment]]:
        """The segments, each with its first row of the batch."""
        rows = accumulate((segment.count for segment in self.segments), initial=0)
        return list(zip(rows, self.segments, strict=False))

    def find_seen_keys(self, mask: AttentionMask, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """Return the first key that each row of blocks sees, and the key behind the last one: int64 `[R]` both."""
        found = self._seen.get(mask)
        if found is None:
            low = batch.firsts
            if mask.window:
                low = torch.maximum(low, batch.positions - mask.window + 1)
            found = self._seen[mask] = low, batch.positions + 1 if mask.causal else batch.lengths
        return found

    def find_nearest_keys(self, window: int, batch: Batch) -> Tensor | None:
        """Return the first key that each row sees in a window, int64 `[R]`; None without a window."""
        if not window:
            return None
        found = self._nearest.get(window)
        if found is None:
            found = self._nearest[window] = (batch.positions - window + 1).clamp_(min=0)
        return found

    def make_spans_once(self, mask: AttentionMask | int, make: Callable[[], list[Span]]) -> list[Span]:
        """Return the spans of one kind of mask, made once a step. mask: of causal attention, its window."""
        found = self._spans.get(mask)
        if found is None:
            found = self._spans[mask] = make()
        return found

    def gather_angles(self, rope: Rope, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for the rotated part of each head, gathered once a step for each table.

        Both are float32 `[R, 1, n]`: factors of the part itself, and of the part with its halves swapped.
        """
        found = self._angles.get(id(rope))
        if found is None:
            at = batch.positions.clamp(min=0)
            cos = rope.cos[at]
            sin = rope.sin[at]
            found = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
            self._angles[id(rope)] = found
        return found

    def check_caches(self, slots: int, rows: int) -> None:
        """Raise IndexError for rows that the caches do not have."""
        for segment in self.segments:
            if not 0 <= segment.slot < slots or not 0 <= segment.start <= segment.start + segment.count <= rows:
                raise IndexError(f"{segment} in {slots} slots of {rows} rows")

    def write_caches(self, keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Write keys and values, each `[R, KV, hd]`, at the slots and positions of their rows. Caches that are one
        tensor get the keys alone.
        """
        both = ((keys, k_cache), (values, v_cache))[: 1 if k_cache is v_cache else 2]
        for heads, cache in both:
            coded = as_bytes(format_of(cache).encode(heads)).transpose(0, 1)
            for row, segment in self.segments_with_rows:
                target = as_bytes(cache).select(0, segment.slot).narrow(1, segment.start, segment.count)
                target.copy_(coded.narrow(1, row, segment.count))
