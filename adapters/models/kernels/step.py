"""One forward as data: which rows of which slots it computes, and which tensors it leaves behind.

Kernels, decoders and drafts all read these three classes, so they stand below the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from attrs import frozen
from torch import Tensor

_slot = attrgetter("slot")
UNSETTLED = 64  # rows of one slot that a step may roll back in recurrent layers


@frozen
class Segment:
    """`count` consecutive rows of one slot's sequence, from position `start` on."""

    slot: int
    start: int
    count: int


@frozen
class Step:
    """One forward as data: the segments' rows in order, padded up to `bucket` rows.

    A prefill chunk is one segment. A batched decode has one segment of one row per request. A verification has
    one segment per request: its last token and the proposals after it. A tree of proposals has several segments of one
    slot, one after the other: its chain pieces in depth-first order. The parent of a piece's first row is the latest
    row of an earlier piece that is one position before it. Only the root is at the first position.

    rows_only: no logits or hidden states will be asked for, as in prefill. The target's last layer then stops once
    its keys and values are written; auxiliary hidden states of earlier layers are written as always.
    """

    segments: tuple[Segment, ...]
    bucket: int
    rows_only: bool = False

    @cached_property
    def rows(self) -> int:
        return sum([segment.count for segment in self.segments])

    @cached_property
    def parts(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each slot, in order."""
        return tuple([tuple(part) for _, part in groupby(self.segments, _slot)])

    def settles(self, segment: Segment) -> bool:
        """Do all rows of this segment stay, so that recurrent layers move their state as the step runs?

        In a step that decodes, that is so for the rows of a prompt that go with it, if they are many.
        """
        return self.rows_only or segment.count > UNSETTLED

    @property
    def branches(self) -> bool:
        """True if the step has a tree."""
        return len(self.parts) < len(self.segments)


@frozen
class Forward:
    """The tensors that one forward leaves behind: static buffers of the shard, to be read before the next forward.

    hidden: `[bucket, D]` in the model's dtype, the residual stream after the shard's last layer (no final norm). It
    means nothing on the last shard after a step of `rows_only`. aux_hidden_states: layer index -> `[bucket, D]`, the
    residual stream after that decoder layer (what a DFlash draft reads).
    """

    hidden: Tensor
    aux_hidden_states: Mapping[int, Tensor]
