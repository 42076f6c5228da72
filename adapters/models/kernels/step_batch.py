"""The batch of one step as kernels see it: static buffers on the device.

Host code fills a staging table and copies all of it to the device, so that recorded graphs can be replayed for every
step of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from struct import Struct
from typing import Any, Self

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.step import Segment, Step

BROUGHT = 128  # numbers that one program copies to the device
LISTED = 128  # up to this many rows are written as Python numbers; numpy is quicker for more


@define(eq=False)
class Batch:
    """The input of one step for the kernels: static buffers of one bucket, filled anew before every forward.

    On the device there is one int64 value for each row. The columns are views of one `[4, bucket]` table, which is
    filled in one transfer:

        tokens    token id; 0 in padded rows (a later shard, which gets hidden states, leaves it at 0).
        slots     slot whose sequence the row belongs to; 0 in padded rows.
        positions the row's position in its sequence; -1 marks a padded row.
        lengths   keys the row attends to, `positions + 1`; so 0 in padded rows.

    Rows of one segment are consecutive, and so are their positions. Real rows come first, padded rows last. No slot
    appears in two segments. A padded row must not write to the caches; its results are never read.

    segments holds the same facts on the host, for kernels that choose their work there. Inside `Kernels.launch` a
    kernel that records graphs must read the device tensors only, unless the choice is part of the graph's key. pages:
    where rows are paged, int32 `[slots, n]` on the device: the cache pages of a slot's rows, in order. The caches
    are `[pages, KV, rows of a page, hd]` then. plan belongs to the kernels: what `Kernels.prepare_step` worked out for
    this step.

    Few rows are put together as Python numbers and written in one call. Every small torch operation lets other
    threads take the interpreter, and would wait to get it back as often as a step has rows. A decode step would also
    take longer with numpy. A prompt's chunk goes through numpy, which saves 0.2 ms that its device would wait.
    """

    bucket: int
    device: torch.device
    pages: Tensor | None = field(default=None, kw_only=True)
    table: Tensor = field(init=False)
    tokens: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    segments: tuple[Segment, ...] = field(init=False, default=())
    plan: Any = field(init=False, default=None)
    _padding: tuple[int, ...] = field(init=False, default=(0, -1, 0))  # what padded rows have behind their tokens
    _staging: Tensor = field(init=False)
    _memory: memoryview = field(init=False)  # of the same
    _packing: Struct = field(init=False)
    _copied: torch.cuda.Event | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        on_cuda = self.device.type == "cuda"
        columns = 1 + len(self._padding)
        self._staging = torch.zeros(columns, self.bucket, dtype=torch.int64, pin_memory=on_cuda)
        self._memory = memoryview(self._staging.numpy())  # type: ignore[arg-type]
        self._packing = Struct(f"={columns * self.bucket}q")
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.table = self._staging if self.device.type == "cpu" else self._staging.to(self.device)
        self.tokens, self.slots, self.positions, self.lengths = self.table[:4].unbind(0)

    def with_pages(self, pages: Tensor | None) -> Self:
        """Return this batch with another table of pages. It shares everything else, until the next `load`."""
        if pages is self.pages:
            return self
        found = copy(self)
        found.pages = pages
        return found

    def load(self, step: Step, tokens: Tensor | Sequence[int] | None) -> None:
        """Fill the buffers from `step`; tokens: int64 `[rows]` on any device, or None on a later shard."""
        rows = step.rows
        there = None
        if isinstance(tokens, Tensor) and not tokens.is_cpu:
            there = tokens
            tokens = None
        if rows > LISTED:
            self._write_wide(step, tokens)
        else:
            self._write(step, tokens.tolist() if isinstance(tokens, Tensor) else tokens)
        if self._copied is not None:
            self._upload(rows, there)
            self._copied.record()
        elif there is not None:
            self.tokens[:rows].copy_(there)
        self.segments = step.segments

    def _upload(self, rows: int, tokens: Tensor | None) -> None:
        """Copy the staged table to the device; the token column comes from `tokens` where they are on the device
        already.

        A kernel does it in 2 us; handing over to the copy engine and back would take ten. It is launched without
        programmatic dependent launch, so no kernel of this step begins before those of the step before have ended.
        `hopper_attention` relies on that.
        """
        from adapters.models.kernels.triton.rows import bring_table  # noqa: PLC0415 - needs Triton, so a GPU build
        from adapters.models.kernels.triton_launch import launch  # noqa: PLC0415

        count = self._staging.numel()
        staged = self._staging
        given = self.table
        if tokens is not None:
            given = tokens.to(self.device, torch.int64).contiguous()
        known = 0 if tokens is None else rows
        programs = -(-count // BROUGHT)
        launch(bring_table, (programs,), staged, given, self.table, known, count, BLOCK=BROUGHT, num_warps=1)

    def _write(self, step: Step, tokens: Sequence[int] | None) -> None:
        padded_rows = self.bucket - step.rows
        numbers = [0] * step.rows if tokens is None else [*tokens]
        numbers += [0] * padded_rows
        for column, padding in zip(self._columns(step), self._padding, strict=True):
            numbers += column
            numbers += [padding] * padded_rows
        if self._copied is not None:
            self._copied.synchronize()
        self._packing.pack_into(self._memory, 0, *numbers)

    def _write_wide(self, step: Step, tokens: Tensor | Sequence[int] | None) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        table = np.frombuffer(self._memory, np.int64).reshape(-1, self.bucket)
        table[0, : step.rows] = 0 if tokens is None else tokens
        self._fill_columns(step, table[1:, : step.rows])
        table[:, step.rows :] = np.array((0, *self._padding))[:, None]

    def _fill_columns(self, step: Step, columns: np.ndarray) -> None:
        """Write `_columns` of a step of many rows to their offsets."""
        columns[:] = self._columns(step)

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        """Return the columns behind the tokens, without padding."""
        slots = list[int]()
        positions = list[int]()
        for segment in step.segments:
            slots += [segment.slot] * segment.count
            positions += range(segment.start, segment.start + segment.count)
        return slots, positions, [position + 1 for position in positions]


@define(eq=False)
class BlockBatch(Batch):
    """A batch whose segments are blocks of a draft: positions `[start, stop)` behind context rows `[first, start)`.

    lengths are the stops of the blocks here: the keys that the block as a whole may see. Two more columns:

        starts the position of the block's first row; 0 in padded rows.
        firsts the block's first valid context row; 0 in padded rows.

    before holds firsts on the host, one for each segment, and is set before `load`.
    """

    _padding: tuple[int, ...] = field(init=False, default=(0, -1, 0, 0, 0))
    starts: Tensor = field(init=False)
    firsts: Tensor = field(init=False)
    before: tuple[int, ...] = field(init=False, default=())

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.starts, self.firsts = self.table[4:6].unbind(0)

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        slots, positions, _ = super()._columns(step)
        stops = list[int]()
        starts = list[int]()
        firsts = list[int]()
        for segment, first in zip(step.segments, self.before, strict=True):
            stops += [segment.start + segment.count] * segment.count
            starts += [segment.start] * segment.count
            firsts += [first] * segment.count
        return slots, positions, stops, starts, firsts


@define(eq=False)
class StateBatch(Batch):
    """A batch for layers with recurrent state. Three more columns:

        bases   position of the slot's state, a multiple of 64 that is at most 63 below the segment's start.
        counts  rows of the segment, at its first row; 0 elsewhere and in padded rows.
        settled 1 in rows of a segment that settles (`Step.settles`), else 0.

    before holds bases on the host, one for each segment, and is set before `load`. settles: all segments settle. mixed:
    some segments settle, and others may be rolled back. holds: those that settle leave their last rows, 64 at most, in
    the rings, so that the last one may be rolled back. single: no segment settles, and each has one row. A graph may
    rely on all of these, which `settle` sets before `load`.
    """

    _padding: tuple[int, ...] = field(init=False, default=(0, -1, 0, 0, 0, 0))
    bases: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    settled: Tensor = field(init=False)
    before: tuple[int, ...] = field(init=False, default=())
    settles: bool = field(init=False, default=False)
    mixed: bool = field(init=False, default=False)
    holds: bool = field(init=False, default=False)
    single: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.bases, self.counts, self.settled = self.table[4:].unbind(0)

    def settle(self, step: Step) -> None:
        """Note which segments of the step settle."""
        settling = [*map(step.settles, step.segments)]
        self.settles = all(settling)
        self.mixed = any(settling) and not self.settles
        self.holds = any(settling) and not step.rows_only
        self.single = not any(settling) and step.rows == len(step.segments)

    @property
    def kind(self) -> str:
        """The kind of the step, as a name for the graph of its layers: what recurrent layers may rely on."""
        if self.single:
            return "single"
        return "mixed" if self.mixed else "held" if self.holds else "settled" if self.settles else "layers"

    def _fill_columns(self, step: Step, columns: np.ndarray) -> None:
        """Write the columns without Python lists, because prompts come this way."""
        first = 0
        for segment, base in zip(step.segments, self.before, strict=True):
            own = columns[:, first : first + segment.count]
            own[0] = segment.slot
            own[1] = np.arange(segment.start, segment.start + segment.count)
            own[2] = own[1] + 1
            own[3] = base
            own[4] = 0
            own[4, 0] = segment.count
            own[5] = self.settles or step.settles(segment)
            first += segment.count

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        bases = list[int]()
        counts = list[int]()
        settled = list[int]()
        for segment, base in zip(step.segments, self.before, strict=True):
            bases += [base] * segment.count
            counts += [segment.count, *[0] * (segment.count - 1)]
            settled += [int(self.settles or step.settles(segment))] * segment.count
        return *super()._columns(step), bases, counts, settled
