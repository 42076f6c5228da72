"""Keys and values of some layers, for every slot, in one tensor: `SlotRows` for a `DenseShard` or a draft.

Either every slot has memory of its own in one piece (`KvCache`), or its rows lie in pages of a pool that a table lists
(`PagedKvCache`, on a GPU).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from adapters.models.decoder.cache.host_copy import copy
from adapters.models.decoder.shard import NamedTensors
from adapters.models.kernels.formats.row_format import RowFormat, RowLayout, as_bytes, row_types
from adapters.sequence_layout import RowSpec, dtype_name
from effects.ids import PAGE, Span

Piece: TypeAlias = tuple[int, int]  # a slot, and the number of a page of rows in it


def split_by_pages(start: int, stop: int, page: int) -> Iterator[Span]:
    """Yield the parts of a span that lie in one page of this many rows each, in order."""
    while start < stop:
        end = min(stop, (start // page + 1) * page)
        yield start, end
        start = end


class KvCache:
    """`[layers, parts, slots, KV, rows, width]`, zeroed, so that what is masked is always finite.

    Rows have fixed addresses here: slot after slot, row after row. So on a CPU a page is no place in memory, as it is
    in `PagedKvCache`. It is only a permit to keep memory for a piece of a slot's rows.

    page: the rows that get and lose memory together, alike in all caches of a class.
    names: of the layers, as in `layers.12`.
    capacity: the rows of a slot that may be used; all by default. A slot has them in whole key tiles of the kernels. In
        host memory a row takes memory once it is written.
    layout: of a row: its parts, and what their numbers are.
    pages: in host memory, the number of permits that slots share; 0: every slot may keep all of its rows. When a permit
        goes to another slot, the memory of the rows that it covered is given back.
    """

    table: Tensor | None = None
    is_addressable = True
    page: ClassVar[int] = PAGE

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None = None,
        pages: int = 0,
        layout: RowLayout | None = None,
    ) -> None:
        """Allocate the memory. shape: slots, key heads, rows, elements of a head. layout: None: keys and values have
        this dtype.
        """
        self.slots, heads, rows, width = shape
        self.capacity = rows if capacity is None else capacity
        self.layout = RowLayout(row_types(dtype), RowFormat(dtype).head_size(width)) if layout is None else layout
        keys = tuple(f"{name}.{part}" for name in names for part in self.layout.parts)
        self.spec = RowSpec(keys, heads, width, dtype_name(dtype))
        self.pages = pages
        self._pieces = dict[int, Piece]()  # by page, the piece that it permits
        self._permits = dict[Piece, int]()  # the other way round
        self._counts = [0] * self.slots  # pages of each
        self._allocate_rows((len(names), len(self.layout.parts), *shape), dtype, device)
        # Keys and values of each layer, `[slots, KV, rows, hd]`: the same object where a row is both.
        self.layers: list[tuple[Tensor, Tensor]] = self._open_layers()

    def _allocate_rows(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._memory: mmap.mmap | None = None
        if device.type == "cpu" and torch.Size(shape).numel():
            size = torch.Size(shape).numel() * dtype.itemsize
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._all = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        else:
            self._all = torch.zeros(shape, dtype=dtype, device=device)

    def _open_layers(self) -> list[tuple[Tensor, Tensor]]:
        return [self.layout.open_parts(tuple(layer)) for layer in self._all]

    @property
    def nbytes(self) -> int:
        """The most bytes that the rows can take."""
        return min(self._all.nbytes, self.pages * self.page * self.spec.token_bytes) if self.pages else self._all.nbytes

    def check_span(self, slot: int, start: int, stop: int) -> None:
        """Raise ValueError for rows that no slot has."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is not in 0..{self.slots - 1}")
        if not 0 <= start < stop <= self.capacity:
            raise ValueError(f"rows {start}..{stop} are not a span within a slot's {self.capacity} rows")

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the rows where they are: a view `[layers, parts, KV, stop - start, hd]`."""
        self.check_span(slot, start, stop)
        return self._all[:, :, slot, :, start:stop]

    def view_layer(self, layer: int, slot: int, start: int, stop: int) -> Tensor:
        """Return rows of one layer where they are: a view `[parts, KV, stop - start, hd]`."""
        return self.view(slot, start, stop)[layer]

    def find_table(self, layer: int) -> Tensor | None:  # noqa: ARG002 - here, layers share one
        """Return the table of the pages of a layer's rows, for kernels; None: rows are not paged."""
        return self.table

    def read(self, layer: int, slot: int, start: int, stop: int) -> Tensor:
        """Return rows of one layer as `view_layer` does: where they are, or, if they are in several pages, a copy."""
        parts = [self.view_layer(layer, slot, *span) for span in self.spans(start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def put(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write rows of one layer from `start` on, each `[KV, rows, hd]`."""
        for cache, rows in zip(self.layers[layer], (keys, values), strict=True):
            as_bytes(cache)[slot, :, start : start + rows.shape[1]] = as_bytes(rows)

    def put_bytes(self, layer: int, slot: int, start: int, rows: Tensor) -> None:
        """Write rows of one layer from `start` on as `view_layer` has them, `[parts, KV, rows, width]` in bytes."""
        whole = rows.view(self._all.dtype)
        for begin, end in self.spans(start, start + whole.shape[2]):
            self.view_layer(layer, slot, begin, end).copy_(whole[:, :, begin - start : end - start])

    def make_rows(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer for `count` rows of one slot, outside this memory."""
        shape = (len(self.layout.parts), 1, self.spec.heads, count, self.spec.width)
        return [self.layout.open_parts(tuple(self._all.new_zeros(shape))) for _ in self.layers]

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        """Give the slot these pages in place of all that it had, and put the source's first `keep` rows into them.

        The copy comes before memory is given back, so a page may come from the source itself.
        """
        self._check_pages(slot, 0, pages)
        if keep > len(pages) * self.page:
            raise ValueError(f"slot {slot} keeps {keep} rows and is given {len(pages)} pages of {self.page} for them")
        lost = self._permit(slot, 0, pages)
        if keep and source != slot:
            self.copy(source, slot, keep)
        self._give_back(lost)

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        """Add pages of the pool to a slot, behind its last page."""
        self._check_pages(slot, self._counts[slot], pages)
        self._give_back(self._permit(slot, self._counts[slot], pages))

    def _check_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Raise ValueError for pages that are not in the pool, that come twice, or that the slot has no rows for."""
        stop = first + len(pages)
        most = -(-self.capacity // self.page)
        if stop > most:
            raise ValueError(f"slot {slot} is given {stop} pages; it has rows for {most}")
        if len(set(pages)) < len(pages) or not all(0 <= page < self.pages for page in pages):
            raise ValueError(f"pages {tuple(pages)} for slot {slot}: not all are in 0..{self.pages - 1}, each once")

    def _permit(self, slot: int, first: int, pages: Sequence[int]) -> list[Piece]:
        """Note that these pages permit the slot's pieces from `first` on. Return the pieces whose permit they were.

        A page permits one piece at most, and a piece has one permit at most. A piece that gets another permit loses
        its old one here; otherwise its memory would be given back when that old page goes to another slot.
        """
        given = [(slot, number) for number in range(first, first + len(pages))]
        for piece in given:
            self._pieces.pop(self._permits.pop(piece, -1), None)
        lost = [self._pieces.pop(page) for page in pages if page in self._pieces]
        for piece in lost:
            del self._permits[piece]
        for page, piece in zip(pages, given, strict=True):
            self._pieces[page] = piece
            self._permits[piece] = page
        self._counts[slot] = first + len(pages)
        return lost

    def _give_back(self, pieces: Iterable[Piece], layers: range | None = None) -> None:
        """Return the memory of these pieces to the system: their rows are zeros then. layers: by index; None: all.

        Bytes at the ends of a piece that do not fill one of the system's own pages stay.
        """
        if self._memory is None:
            return
        chosen = slice(None) if layers is None else slice(layers.start, layers.stop)
        for slot, number in pieces:
            rows = self._all[0, 0, slot, 0, number * self.page : (number + 1) * self.page]
            step = self._all.stride(3) * rows.itemsize
            size = rows.nbytes
            for part in self._all[chosen, :, slot, 0, number * self.page].flatten(0, 1):
                begin = part.data_ptr() - self._all.data_ptr()
                for at in range(begin, begin + step * self.spec.heads, step):
                    start = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
                    stop = (at + size) // mmap.PAGESIZE * mmap.PAGESIZE
                    if start < stop:
                        self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of slot `source` into slot `target`."""
        self.copy_span(source, target, 0, count)

    def copy_span(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy rows `[start, stop)` of slot `source` into slot `target`."""
        for first, last in self.spans(start, stop):
            self.view(target, first, last).copy_(self.view(source, first, last))

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the parts of a span that `view` and `view_layer` accept, in order."""
        yield start, stop

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        """Return rows by name, each `[KV, stop - start, hd]`, on the host."""
        parts = [self.view(slot, *span).flatten(0, 1) for span in self.spans(start, stop)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        host = torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)
        return dict(zip(self.spec.names, host, strict=True))

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        """Write rows that `export` returned, from `start` on. ValueError for another name, shape or dtype."""
        unexpected = sorted(set(self.spec.names).symmetric_difference(rows))
        if unexpected:
            raise ValueError(f"rows of {len(self.layers)} layers: {unexpected[0]} is missing or not expected")
        first = rows[self.spec.names[0]]
        count = first.shape[1] if first.dim() == 3 else 0
        dtype = self._all.dtype
        self.check_span(slot, start, start + count)
        shape = (self.spec.heads, count, self.spec.width)
        for name, tensor in rows.items():
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        for begin, end in self.spans(start, start + count):
            for name, target in zip(self.spec.names, self.view(slot, begin, end).flatten(0, 1), strict=True):
                given = rows[name][:, begin - start : end - start]
                if target.device.type == given.device.type == "cpu":
                    copy(target, given)
                else:
                    target.copy_(given)

    def close(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self._all = self._all.new_empty(0)
        self._memory = None


class PagedKvCache(KvCache):
    """`[layers, parts, pages, KV, page, hd]`, zeroed. Slots whose sequences begin alike may share pages.

    table: int32 `[slots, pages of a slot]` on the device, for kernels, at an address that stays. Entries for pages that
        a slot does not have name some page. It is written on the lane, in order with the launches there.
    """

    table: Tensor

    def _allocate_rows(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        layers, parts, slots, heads, rows, width = shape
        most = -(-rows // self.page)  # of a slot
        self._all = torch.zeros(layers, parts, self.pages, heads, self.page, width, dtype=dtype, device=device)
        # Before anybody is given pages, as while a server starts, slots have theirs in turn.
        self._pages = [[(slot * most + at) % self.pages for at in range(most)] for slot in range(slots)]
        self.table = torch.tensor(self._pages, dtype=torch.int32).to(device)

    @property
    def nbytes(self) -> int:
        return self._all.nbytes + self.table.nbytes

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the rows where they are. All must be in one page."""
        self.check_span(slot, start, stop)
        number, first = divmod(start, self.page)
        if stop - start > self.page - first:
            raise ValueError(f"rows {start}..{stop} are in several pages of {self.page}")
        return self._all[:, :, self._pages[slot][number], :, first : first + stop - start]

    def put(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        for begin, end in self.spans(start, start + keys.shape[1]):
            number, first = divmod(begin, self.page)
            for cache, rows in zip(self.layers[layer], (keys, values), strict=True):
                target = as_bytes(cache)[self._pages[slot][number], :, first : first + end - begin]
                target.copy_(as_bytes(rows)[:, begin - start : end - start])

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        return split_by_pages(start, stop, self.page)

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        self._check_pages(slot, 0, pages)
        if keep > len(pages) * self.page:
            raise ValueError(f"slot {slot} keeps {keep} rows and is given {len(pages)} pages of {self.page} for them")
        before = self._pages[source][: -(-keep // self.page)]
        moves = [(old, new) for old, new in zip(before, pages, strict=False) if old != new]
        read = {old for old, _ in moves}
        written = {new for _, new in moves}
        # A page that is both read and written is read before anything is written.
        held = {old: self._all[:, :, old].clone() for old in read & written}
        for old, new in moves:
            self._all[:, :, new].copy_(held.get(old, self._all[:, :, old]))
        self._counts[slot] = 0
        self.grow(slot, pages)

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        first = self._counts[slot]
        stop = self._counts[slot] + len(pages)
        self._check_pages(slot, first, pages)
        self._pages[slot][first:stop] = pages
        # The host must not wait for what the device runs: a forward with rows of prompts takes 27 ms on an H200.
        self.table[slot, first:stop].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
        self._counts[slot] = stop
