"""Between host memory and what a slot keeps: one copy a run and part, beside whatever a GPU computes meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol, TypeAlias, cast

import torch
from attrs import define
from torch import Tensor

from adapters.models.decoder.host_copy import copy
from adapters.models.decoder.shard import NamedTensors
from adapters.sequence_layout import RowSpec, TensorSpec, torch_dtype
from adapters.transfer.strided_copy import copy_box
from effects.ids import PAGE, Span

_streams = dict[torch.device, deque[torch.cuda.Stream]]()  # nobody copies on these now
# Which rows, uint8 memory that holds a run, and the row that this begins at.
Run: TypeAlias = tuple[Span, Tensor, int]
# Of each device, where it will have done all that it had been told by then: what copies beside the lane come behind.
Marks: TypeAlias = Mapping[torch.device, torch.cuda.Event]
UNMARKED: Marks = {}


class RowHolder(Protocol):
    """Rows of slots, on whatever device, as a shard or a draft has them; see `adapters.models.decoder.shard.Shard`."""

    @property
    def row_spec(self) -> RowSpec: ...

    @property
    def addressed(self) -> bool: ...

    def rows(self, slot: int, start: int, stop: int) -> Tensor: ...

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors: ...


class AskedByName(RowHolder, Protocol):
    """One that is not `addressed`."""

    def import_runs(self, slot: int, runs: Sequence[tuple[int, Tensor]], keep: Sequence[object]) -> None:
        """Have rows put back, each from its start on: `[names, heads, rows, width]` in the order of `row_spec`.

        Whatever is asked there after this finds them, or is told that all rows are lost. keep: is referred to until
        they have been read.
        """
        ...


class TargetPart(RowHolder, Protocol):
    """One of the shards that a target consists of."""

    @property
    def state_specs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def state_block(self) -> int: ...

    def export_state(self, slot: int) -> NamedTensors: ...

    def import_state(self, slot: int, state: NamedTensors) -> None: ...


@define(eq=False)
class Mover:
    """Moves one part's rows. In a buffer all tensors of `rows` lie end to end, the part's from number `first` on."""

    part: RowHolder
    rows: RowSpec
    first: int = 0

    @property
    def anywhere(self) -> bool:
        """May `put` and `take` be called beside the lane?"""
        return self.part.addressed

    def tell(self, slot: int, runs: Sequence[Run], keep: Sequence[object]) -> None:
        """Have a part that is asked by name put these. keep: what their memory is there for as long as."""
        cast("AskedByName", self.part).import_runs(slot, [self._cut(*run) for run in runs], keep)

    def _cut(self, span: Span, data: Tensor, begin: int) -> tuple[int, Tensor]:
        """`_own(data)`, of these rows; in one step, since each takes longer than naming what it comes to."""
        rows, names, (start, stop) = self.rows, len(self.part.row_spec.names), span
        of_head = data.nbytes // rows.token_bytes * rows.width
        form = (names, rows.heads, stop - start, rows.width), (rows.heads * of_head, of_head, rows.width, 1)
        at = self.first * rows.heads * of_head + (start - begin) * rows.width
        typed = data.view(torch_dtype(rows.dtype))
        return start, typed.as_strided(*form, typed.storage_offset() + at)

    def put(self, slot: int, span: Span, data: Tensor, begin: int, after: Marks = UNMARKED) -> None:
        """Bring rows `span` into the slot, `anywhere`; `data` (uint8) holds a run that begins at row `begin`.

        They are there when this returns. Raises ValueError or RuntimeError where they cannot be.
        """
        own, places = self._own(data), self._places(slot, span)
        device = places[0][1].device
        if device.type == "cuda":
            with own_stream(device, after):
                for (first, last), target in places:
                    copy_box(target, by_layer(own)[..., first - begin : last - begin, :])
        else:
            for (first, last), target in places:
                copy(target, by_layer(own)[..., first - begin : last - begin, :])

    def take(self, slot: int, span: Span, data: Tensor, after: Marks = UNMARKED) -> None:
        """Copy rows `span` of the slot out into `data` (uint8); they are there when this returns. On the lane, or
        `anywhere` while nobody changes these rows. Raises RuntimeError or RowsLost where they cannot be had.
        """
        own = self._own(data)
        if not self.part.addressed:
            source = self.part.export_rows(slot, *span)
            for name, view in zip(self.part.row_spec.names, own, strict=True):
                view.copy_(source[name])
            return
        places = self._places(slot, span)
        device = places[0][1].device
        if device.type == "cuda":
            with own_stream(device, after):
                for (first, last), rows in places:
                    copy_box(by_layer(own)[..., first - span[0] : last - span[0], :], rows)
        else:
            for (first, last), rows in places:
                copy(by_layer(own)[..., first - span[0] : last - span[0], :], rows)

    def _places(self, slot: int, span: Span) -> list[tuple[Span, Tensor]]:
        """Views of the rows where they are: page by page on a GPU, all at once in host memory."""
        spans = [*paged(*span)]
        if self.part.rows(slot, *spans[0]).device.type != "cuda":
            spans = [span]
        return [(each, self.part.rows(slot, *each)) for each in spans]

    def _own(self, data: Tensor) -> Tensor:
        """`[names, heads, tokens, width]`, without a copy."""
        rows, tokens = self.rows, data.nbytes // self.rows.token_bytes
        whole = data.view(torch_dtype(rows.dtype)).view(len(rows.names), rows.heads, tokens, rows.width)
        return whole[self.first : self.first + len(self.part.row_spec.names)]


def paged(start: int, stop: int) -> Iterator[Span]:
    """The span, page by page: what a part on a GPU has a view of."""
    while start < stop:
        end = min(stop, (start // PAGE + 1) * PAGE)
        yield start, end
        start = end


def by_layer(tensors: Tensor) -> Tensor:
    """`[names, ...]` as `[layers, 2, ...]`."""
    return tensors.view(-1, 2, *tensors.shape[1:])


def movers(parts: Iterable[RowHolder], rows: RowSpec) -> tuple[Mover, ...]:
    """One for each part that has rows. ValueError where the parts together do not have exactly those of `rows`."""
    having = [part for part in parts if part.row_spec.names]
    names = tuple(name for part in having for name in part.row_spec.names)
    if names != rows.names:
        odd = sorted(set(names).symmetric_difference(rows.names)) or ["their order"]
        raise ValueError(f"the parts do not have the rows that are kept: {odd[0]} is odd")
    firsts = accumulate((len(part.row_spec.names) for part in having), initial=0)
    return tuple(Mover(part, rows, first) for part, first in zip(having, firsts, strict=False))


@define(eq=False)
class StateMover:
    """Moves the positional state of a slot; in a buffer the tensors of `specs` lie end to end. On the lane."""

    parts: Sequence[TargetPart]
    specs: Sequence[TensorSpec]

    def standing(self, rows: int) -> int:
        """Where a slot has its state that has settled so many rows."""
        return rows - max((rows % part.state_block for part in self.parts if part.state_specs), default=0)

    def put(self, slot: int, data: Tensor) -> None:
        """Raises ValueError or RuntimeError where it cannot be."""
        state = views(self.specs, data)
        for part in self.parts:
            if part.state_specs:
                part.import_state(slot, {spec.name: state[spec.name] for spec in part.state_specs})

    def take(self, slot: int, data: Tensor) -> None:
        into = views(self.specs, data)
        for part in self.parts:
            if part.state_specs:
                for name, tensor in part.export_state(slot).items():
                    into[name].copy_(tensor)


def views(specs: Iterable[TensorSpec], data: Tensor) -> NamedTensors:
    """`data` (uint8, all tensors end to end) as the named tensors, without a copy."""
    found, at = dict[str, Tensor](), 0
    for spec in specs:
        found[spec.name] = data[at : at + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)
        at += spec.nbytes
    return found


def marks(devices: Iterable[torch.device]) -> Marks:
    """On the lane: behind all that it has told them so far. Nobody waits for that here."""
    streams = [torch.cuda.current_stream(one) for one in devices if one.type == "cuda"]
    return {stream.device: stream.record_event() for stream in streams}


@contextmanager
def own_stream(device: torch.device, after: Marks = UNMARKED) -> Iterator[None]:
    """So that runs that are moved side by side do not wait for each other, nor for what is computed. The same few again
    and again, whatever thread asks. What was asked there is done when this ends, whether it fails or not.
    """
    free = _streams.setdefault(device, deque())
    try:
        stream = free.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.query()  # CUDA's driver has no context on a new thread until its runtime was asked for something
            if device in after:
                stream.wait_event(after[device])
            try:
                yield
            finally:
                stream.synchronize()
    finally:
        free.append(stream)
