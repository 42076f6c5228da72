"""Between host memory and the rows of a slot: one copy a run, and on a GPU beside whatever is computed there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from attrs import define
from torch import Tensor

from adapters.layout import RowSpec, torch_dtype
from effects.ids import Span

NamedTensors = Mapping[str, Tensor]
_streams = dict[torch.device, deque[torch.cuda.Stream]]()  # nobody copies on these now
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slots(Protocol):
    """Rows of slots, on whatever device, as a shard or a draft has them; see `adapters.models.shard.Shard`."""

    @property
    def addressed(self) -> bool: ...

    def rows(self, slot: int, start: int, stop: int) -> Tensor: ...

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors: ...

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None: ...


@define(eq=False)
class Mover:
    """Moves runs of rows as `rows` says they lie in a buffer: all tensors end to end."""

    slots: Slots
    rows: RowSpec

    @property
    def anywhere(self) -> bool:
        """May `put` be called beside the lane?"""
        return self.slots.addressed

    def put(self, slot: int, span: Span, data: Tensor, first: int) -> None:
        """Bring rows `span` into the slot; `data` (uint8) holds a run that begins at row `first`.

        They are there when this returns. Raises ValueError or RuntimeError where they cannot be.
        """
        start, stop = span
        tokens = data.nbytes // self.rows.token_bytes
        if not self.slots.addressed:
            tensors = self._views(data, tokens)
            self.slots.import_rows(
                slot, start, {name: one[:, start - first : stop - first] for name, one in tensors.items()}
            )
            return
        target = self.slots.rows(slot, start, stop)
        if target.device.type == "cuda":
            with torch.inference_mode(), torch.cuda.device(target.device), own_stream(target.device):
                there = data.to(target.device, non_blocking=True)
                target.copy_(self._shaped(there, tokens)[..., start - first : stop - first, :])
                torch.cuda.current_stream().synchronize()
                del there  # before anybody else copies on this stream
        else:
            copy(target, self._shaped(data, tokens)[..., start - first : stop - first, :])

    def take(self, slot: int, span: Span, data: Tensor) -> None:
        """Copy rows `span` of the slot out into `data` (uint8). On the lane."""
        start, stop = span
        if not self.slots.addressed:
            source = self.slots.export_rows(slot, start, stop)
            for name, view in self._views(data, stop - start).items():
                view.copy_(source[name])
            return
        rows = self.slots.rows(slot, start, stop)
        if rows.device.type == "cuda":
            gathered = rows.contiguous().view(-1).view(torch.uint8)
            data.copy_(gathered, non_blocking=True)
            torch.cuda.current_stream(rows.device).synchronize()
        else:
            copy(self._shaped(data, stop - start), rows)

    def _shaped(self, data: Tensor, tokens: int) -> Tensor:
        layout = self.rows
        return data.view(torch_dtype(layout.dtype)).view(len(layout.names) // 2, 2, layout.heads, tokens, layout.width)

    def _views(self, data: Tensor, tokens: int) -> dict[str, Tensor]:
        layout = self.rows
        parts = data.view(torch_dtype(layout.dtype)).view(len(layout.names), layout.heads, tokens, layout.width)
        return dict(zip(layout.names, parts, strict=True))


def copy(target: Tensor, source: Tensor) -> None:
    """In host memory, by this thread alone: torch would start threads of its own for each one that asks."""
    integer = INTEGERS[target.element_size()]
    np.copyto(target.view(integer).numpy(), source.view(integer).numpy())


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """So that runs that are loaded side by side do not wait for each other. The same few again and again, whatever
    thread asks: each has device memory of its own for what passes through it.
    """
    free = _streams.setdefault(device, deque())
    try:
        stream = free.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        free.append(stream)
