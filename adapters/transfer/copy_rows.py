"""Copies rows and positional state between a slot and buffers in host memory. Used by the saver and the restorer.

A *run* of rows lies in its buffer (uint8) as `[names, heads, rows, width]`, in the order of `RowSpec.names`: the keys
of a layer, then its values, then those of the next layer. A target may consist of several parts (shards), each with
some of the layers. A `RowMover` copies one part's share of a buffer; `first` says at which name that share begins.

Where a part's rows are decides how they are copied:

* in host memory: all of the span at once, by the C library (`host_copy`);
* on a GPU: page by page, since a slot's rows lie in pages of PAGE rows. Each page is one strided copy
  (`strided_copy`), on a stream of its own, so that it neither waits for the running computation nor occupies the
  processors that compute. It waits only for CUDA events that the lane has recorded behind everything it launched;
* in another process: the part is not addressable. Rows are exported and imported through it, on the lane.

Invariants: when `copy_in` or `copy_out` returns, the bytes are there. The shapes of both sides are compared, so a
buffer of another layout raises and never writes elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol, TypeAlias, cast

import torch
from attrs import define
from torch import Tensor

from adapters.models.decoder.cache.host_copy import copy
from adapters.models.decoder.shard import NamedTensors, PositionalStates, ReadableRows, ShardSpec
from adapters.process_memory import map_pages
from adapters.sequence_layout import RowSpec, TensorSpec, torch_dtype
from adapters.transfer.strided_copy import copy_box
from effects.ids import PAGE, Span

_free_streams = dict[torch.device, deque[torch.cuda.Stream]]()  # streams that are not in use
# (rows to copy, uint8 memory that holds a run, the row at which the run begins)
BufferedRun: TypeAlias = tuple[Span, Tensor, int]
# For each GPU an event behind everything that the lane had launched; copies on other streams wait for it.
CudaEvents: TypeAlias = Mapping[torch.device, torch.cuda.Event]
NO_CUDA_EVENTS: CudaEvents = {}


class ImportableRows(ReadableRows, Protocol):
    """Rows in another process: they are exported and imported by name."""

    def import_runs(self, slot: int, runs: Sequence[tuple[int, Tensor]], keep: Sequence[object]) -> None:
        """Send rows, each `[names, heads, rows, width]` in the order of `spec`, to be written from its start on.

        Later calls to the part find them, or raise RowsLost. keep: objects that own the memory; referred to until it
        has been read.
        """
        ...


class TargetPart(Protocol):
    """One of the shards that a target consists of."""

    @property
    def rows(self) -> ReadableRows: ...

    @property
    def states(self) -> PositionalStates: ...

    @property
    def spec(self) -> ShardSpec: ...


@define(eq=False)
class RowMover:
    """Copies the rows of one part: in a buffer its tensors begin at number `first` of those of `rows`."""

    part: ReadableRows
    rows: RowSpec
    first: int = 0

    @property
    def is_addressable(self) -> bool:
        """Say whether rows can be copied on any thread, and not only through the part itself on the lane."""
        return self.part.is_addressable

    def send_runs(self, slot: int, runs: Sequence[BufferedRun], keep: Sequence[object]) -> None:
        """Send runs to a part in another process. keep: the objects that own their memory."""
        cast("ImportableRows", self.part).import_runs(slot, [self._view_run(*run) for run in runs], keep)

    def _view_run(self, span: Span, data: Tensor, begin: int) -> tuple[int, Tensor]:
        """Return the first row, and this part's share of the rows `span` of a buffer.

        It is `_view_part` and slices of it in a single view, since each view takes longer than to compute the strides.
        """
        rows = self.rows
        names = len(self.part.spec.names)
        start, stop = span
        of_head = data.nbytes // rows.token_bytes * rows.width
        form = (names, rows.heads, stop - start, rows.width), (rows.heads * of_head, of_head, rows.width, 1)
        at = self.first * rows.heads * of_head + (start - begin) * rows.width
        typed = data.view(torch_dtype(rows.dtype))
        return start, typed.as_strided(*form, typed.storage_offset() + at)

    def copy_in(self, slot: int, span: Span, data: Tensor, begin: int, after: CudaEvents = NO_CUDA_EVENTS) -> None:
        """Copy rows `span` into the slot, on any thread; `data` (uint8) holds a run that begins at row `begin`.

        They are there when this returns. Raises ValueError for a wrong shape, RuntimeError where the device fails.
        """
        own = self._view_part(data)
        views = self._view_slot(slot, span)
        device = views[0][1].device
        if device.type == "cuda":
            with borrow_stream(device, after):
                for (first, last), target in views:
                    copy_box(target, view_by_layer(own, target)[..., first - begin : last - begin, :])
        else:
            for (first, last), target in views:
                map_host_rows(target)
                copy(target, view_by_layer(own, target)[..., first - begin : last - begin, :])

    def copy_out(self, slot: int, span: Span, data: Tensor, after: CudaEvents = NO_CUDA_EVENTS) -> None:
        """Copy rows `span` of the slot out into `data` (uint8); they are there when this returns.

        Called on the lane; of an addressable part on any thread, while no step changes these rows. Raises RuntimeError
        or RowsLost.
        """
        own = self._view_part(data)
        if not self.part.is_addressable:
            source = self.part.export(slot, *span)
            for name, view in zip(self.part.spec.names, own, strict=True):
                view.copy_(source[name])
            return
        views = self._view_slot(slot, span)
        device = views[0][1].device
        if device.type == "cuda":
            with borrow_stream(device, after):
                for (first, last), rows in views:
                    copy_box(view_by_layer(own, rows)[..., first - span[0] : last - span[0], :], rows)
        else:
            for (first, last), rows in views:
                copy(view_by_layer(own, rows)[..., first - span[0] : last - span[0], :], rows)

    def _view_slot(self, slot: int, span: Span) -> list[tuple[Span, Tensor]]:
        """Return views of the slot's rows: page by page on a GPU, all at once in host memory."""
        spans = [*split_pages(*span)]
        if self.part.view(slot, *spans[0]).device.type != "cuda":
            spans = [span]
        return [(span, self.part.view(slot, *span)) for span in spans]

    def _view_part(self, data: Tensor) -> Tensor:
        """Return this part's share of a buffer as `[names, heads, tokens, width]`, without a copy."""
        rows = self.rows
        tokens = data.nbytes // rows.token_bytes
        whole = data.view(torch_dtype(rows.dtype)).view(len(rows.names), rows.heads, tokens, rows.width)
        return whole[self.first : self.first + len(self.part.spec.names)]


def split_pages(start: int, stop: int) -> Iterator[Span]:
    """Yield the span page by page: a part on a GPU has a view of one page at most."""
    while start < stop:
        end = min(stop, (start // PAGE + 1) * PAGE)
        yield start, end
        start = end


def map_host_rows(rows: Tensor) -> None:
    """Map the memory of rows `[layers, parts, heads, rows, width]` of a slot, which may never have been written."""
    size = rows[0, 0, 0].nbytes
    for heads in rows.flatten(0, 1):
        for head in heads:
            map_pages(head.data_ptr(), size)


def view_by_layer(tensors: Tensor, rows: Tensor) -> Tensor:
    """Return `[names, ...]` as `[layers, kinds, ...]`, with the layers and kinds of `rows`: keys and values, or one
    tensor that is both.
    """
    return tensors.view(*rows.shape[:2], *tensors.shape[1:])


def create_movers(parts: Iterable[ReadableRows], rows: RowSpec) -> tuple[RowMover, ...]:
    """Return a mover for each part that has rows. ValueError unless together they have those of `rows`.

    Two parts may have the rows of one layer. Both are moved in, and either gives the same bytes when it is moved out.
    """
    having = [part for part in parts if part.spec.names]
    names = tuple(dict.fromkeys(name for part in having for name in part.spec.names))
    firsts = [rows.names.index(part.spec.names[0]) for part in having if part.spec.names[0] in rows.names]
    together = all(
        rows.names[first : first + len(part.spec.names)] == part.spec.names
        for first, part in zip(firsts, having, strict=False)
    )
    if names != rows.names or not together:
        unexpected = sorted(set(names).symmetric_difference(rows.names))
        fault = f"{unexpected[0]} is missing or not expected" if unexpected else "their order is another one"
        raise ValueError(f"the parts do not have the rows that are kept: {fault}")
    return tuple(RowMover(part, rows, first) for part, first in zip(having, firsts, strict=True))


@define(eq=False)
class StateMover:
    """Copies the positional state of a slot. In a buffer the tensors of `specs` lie end to end.

    A state is large, and the lane must not wait for its way to host memory or back. So a state that leaves is copied on
    its device first (`export`), and any thread brings this copy to the buffer (`write`). A state that comes is brought
    to its device by any thread (`stage`), and the lane copies it into the slot (`copy_in`).
    """

    parts: Sequence[TargetPart]
    specs: Sequence[TensorSpec]

    def locate_state(self, rows: int) -> int:
        """Return the row that the slot's state belongs to if it has this many rows.

        Some parts keep a state at multiples of a block only. Then it is the last such multiple.
        """
        return rows - max((rows % part.states.block for part in self._stateful), default=0)

    @property
    def _stateful(self) -> list[TargetPart]:
        return [part for part in self.parts if part.states.specs]

    def export(self, slot: int) -> NamedTensors:
        """Return copies of the slot's state where the parts make them. Called on the lane."""
        return {name: tensor for part in self._stateful for name, tensor in part.states.export(slot).items()}

    def write(self, state: NamedTensors, data: Tensor, after: CudaEvents = NO_CUDA_EVENTS) -> None:
        """Copy an exported state into `data` (uint8), on any thread; it is there when this returns."""
        into = view_tensors(self.specs, data)
        for device in {tensor.device for tensor in state.values()}:
            here = [name for name, tensor in state.items() if tensor.device == device]
            with borrow_stream(device, after) if device.type == "cuda" else nullcontext():
                for name in here:
                    into[name].copy_(state[name], non_blocking=True)

    def stage(self, data: Tensor) -> NamedTensors:
        """Return the state that lies in `data`, brought to the GPUs that need it. Called on any thread.

        Raises torch.OutOfMemoryError. The caller may pass `view(data)` to `copy_in` instead; slower for the lane.
        """
        staged = dict(self.view(data))
        for part in self._stateful:
            device = part.spec.device
            if part.rows.is_addressable and device.type == "cuda":
                with borrow_stream(device):
                    staged |= {spec.name: staged[spec.name].to(device, non_blocking=True) for spec in part.states.specs}
        return staged

    def view(self, data: Tensor) -> NamedTensors:
        """Return the state that lies in `data`, as views into `data`: nothing is copied."""
        return view_tensors(self.specs, data)

    def copy_in(self, slot: int, state: NamedTensors, at: int) -> None:
        """Write a state that belongs to row `at` into the slot, on the lane. ValueError or RuntimeError: it failed."""
        for part in self._stateful:
            part.states.import_(slot, {spec.name: state[spec.name] for spec in part.states.specs}, at)


def view_tensors(specs: Iterable[TensorSpec], data: Tensor) -> NamedTensors:
    """Return `data` (uint8, all tensors end to end) as the named tensors, without a copy."""
    found = dict[str, Tensor]()
    at = 0
    for spec in specs:
        found[spec.name] = data[at : at + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)
        at += spec.nbytes
    return found


def record_cuda_events(devices: Iterable[torch.device]) -> CudaEvents:
    """Record an event on each GPU behind everything that was launched so far, on the lane."""
    streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]
    return {stream.device: stream.record_event() for stream in streams}


@contextmanager
def borrow_stream(device: torch.device, after: CudaEvents = NO_CUDA_EVENTS) -> Iterator[None]:
    """Make a stream of its own the current one, so that copies wait neither for each other nor for computation.

    Streams are used again, by any thread. When the block ends, all copies on it are done, even if it raised.
    """
    free = _free_streams.setdefault(device, deque())
    try:
        stream = free.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.query()  # CUDA's driver has no context on a new thread until its runtime has been called
            if device in after:
                stream.wait_event(after[device])
            try:
                yield
            finally:
                stream.synchronize()
    finally:
        free.append(stream)
