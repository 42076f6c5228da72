"""What one step tells the kernels, as static buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from adapters.models.shard import Segment, Step

HostTable: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@define(eq=False)
class Batch:
    """What one step tells the kernels: static buffers of one bucket, filled anew before every forward.

    On the device, one int64 value a row (views of one `[4, bucket]` tensor, so that one copy fills them):

    tokens    token id; 0 in padded rows (a later shard, which gets hidden states, leaves it at 0)
    slots     slot whose sequence the row belongs to; 0 in padded rows
    positions the row's position in its sequence; -1 marks a padded row
    lengths   keys the row attends to, `positions + 1`; so 0 in padded rows

    Rows of one segment are consecutive and their positions are too; real rows come first, padded rows last. No slot
    appears in two segments. A padded row must not write to the caches; what it computes is never read, but it must
    stay finite.

    segments is the same fact on the host, for kernels that choose their work there. Inside `Kernels.launch` a kernel
    that records graphs must read the device tensors only, unless the choice is part of the graph's key.
    pages: where rows are not in one piece, int32 `[slots, n]` on the device: the page of the caches that has each PAGE
    rows of a slot. The caches are `[pages, KV, PAGE, hd]` then.
    plan is the kernels' own: what `Kernels.prepare` worked out for this step.

    What is written on the host is written with numpy: every small operation of torch's lets other threads have the
    interpreter, and would wait until they give it back, as often as a step has rows.
    """

    bucket: int
    device: torch.device
    pages: Tensor | None = field(default=None, kw_only=True)
    _columns: ClassVar[int] = 4
    table: Tensor = field(init=False)
    tokens: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    segments: tuple[Segment, ...] = field(init=False, default=())
    plan: Any = field(init=False, default=None)
    _staging: Tensor = field(init=False)
    _host: HostTable = field(init=False)  # the same memory
    _copied: torch.cuda.Event | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        on_cuda = self.device.type == "cuda"
        self._staging = torch.zeros(self._columns, self.bucket, dtype=torch.int64, pin_memory=on_cuda)
        self._host = self._staging.numpy()
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.table = self._staging if self.device.type == "cpu" else self._staging.to(self.device)
        self.tokens, self.slots, self.positions, self.lengths = self.table[:4].unbind(0)

    def load(self, step: Step, tokens: Tensor | Sequence[int] | None) -> None:
        """Fill the buffers from `step`; tokens: int64 `[rows]` on any device, or None on a later shard."""
        host, row = self._host, 0
        if self._copied is not None:
            self._copied.synchronize()
        host.fill(0)
        host[2] = -1
        for segment in step.segments:
            end = row + segment.count
            host[1, row:end] = segment.slot
            host[2, row:end] = np.arange(segment.start, segment.start + segment.count)
            row = end
        self._measure(step, host)
        there = tokens if isinstance(tokens, Tensor) and tokens.device.type != "cpu" else None
        if tokens is not None and there is None:
            host[0, :row] = tokens.numpy() if isinstance(tokens, Tensor) else tokens
        if self.table is not self._staging:
            self.table.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if there is not None:
            self.tokens[:row].copy_(there)
        self.segments = step.segments

    def _measure(self, step: Step, host: HostTable) -> None:  # noqa: ARG002 - a batch of blocks needs the step
        host[3] = host[2] + 1


@define(eq=False)
class BlockBatch(Batch):
    """A batch whose segments are blocks of a draft: positions `[start, stop)` behind context rows `[first, start)`.

    lengths are the blocks' stops here: the keys that the block as a whole may see. Two more views tell
    starts the position of the block's first row; 0 in padded rows
    firsts the block's first valid context row; 0 in padded rows
    before is firsts on the host, one a segment; to be set before `load`.
    """

    _columns: ClassVar[int] = 6
    starts: Tensor = field(init=False)
    firsts: Tensor = field(init=False)
    before: tuple[int, ...] = field(init=False, default=())

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.starts, self.firsts = self.table[4:6].unbind(0)

    def _measure(self, step: Step, host: HostTable) -> None:
        row = 0
        for segment, first in zip(step.segments, self.before, strict=True):
            rows = slice(row, row + segment.count)
            host[3, rows], host[4, rows], host[5, rows] = segment.start + segment.count, segment.start, first
            row += segment.count


@define(eq=False)
class StateBatch(Batch):
    """A batch for layers with recurrent state. Two more views tell

    bases  where the state of the row's slot stands, a multiple of 64 that is at most 63 below the segment's start
    counts rows of the segment, at its first row; 0 elsewhere and in padded rows

    before is bases on the host, one a segment; settles says that no row of the step is rolled back. Both are to be set
    before `load`; a graph may rely on `settles`.
    """

    _columns: ClassVar[int] = 6
    bases: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    before: tuple[int, ...] = field(init=False, default=())
    settles: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.bases, self.counts = self.table[4:].unbind(0)

    def _measure(self, step: Step, host: HostTable) -> None:
        super()._measure(step, host)
        row = 0
        for segment, base in zip(step.segments, self.before, strict=True):
            host[4, row : row + segment.count] = base
            host[5, row] = segment.count
            row += segment.count
