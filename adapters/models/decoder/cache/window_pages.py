"""Pages for the rows of layers with a window, on a GPU: one pool for all of these layers. `WindowRows` uses it.

The problem: while a layer computes a chunk of a prompt, it reads the window before the chunk, and it writes the rows of
the chunk. Behind the chunk it needs the last window only. If every layer had room for both, then a chunk of 1024 rows
would take as much memory as the windows do.

The idea: layers run one after the other, so only one of them needs that room at a time. Every slot has pages of 64 rows
for each layer: those of the window, and two more (`count_window_rows`). Between two steps of a prompt a layer does
without one of them, at least. So the layer that runs takes pages that no layer uses. Once it has run, the pages before
its new window are free for the layers behind it. No row is copied. The host decides all of this before the step, and
writes it into the tables of pages. Each layer has a table of its own.

Example: 50 layers have a window of 1024 rows, and a slot has 900 pages for them. Before a chunk of 1024 rows each layer
uses 16 or 17 pages, so at least 50 are free. The first layer takes 16 of them. It gives back the 16 pages before its
new window, and the second layer takes those.

* Kernels of a step run in order, so a layer has read its old window before another layer writes to these pages.
* Rows that are read after their own layer's attention keep their pages until the step ends. Later layers may read them,
  and they may cross to the next shard. Such layers are called lasting.
* A slot has pages of its own, so steps of other slots may run at the same time. Only where layers are few, a chunk
  needs more pages than a slot has. All slots share these (`count_shared_rows`). Only wide steps take them, and these
  run one after the other.
* A step that fails has lost the windows of its chunks, because other layers may have written to their pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache, split_by_pages
from adapters.models.kernels.interfaces.delta_interface import CHUNK
from effects.ids import Span

ALIGNED = 4  # entries of a table: kernels are compiled for addresses that are multiples of 16 bytes


def count_window_rows(window: int) -> int:
    """Return the rows that a slot has room for in each layer: its window in whole pages, settled rows behind it, and a
    narrow step.

    The span begins `window` rows before a multiple of 64. Up to 63 settled rows and 64 new ones are behind that
    multiple. A page has 64 rows, as few as a tile of keys, so little of it lies before the window.
    """
    return (-(-window // CHUNK) + 2) * CHUNK


def count_shared_rows(bucket: int, layers: int, lasting: int) -> int:
    """Return the rows of one layer that all slots share, for steps of up to `bucket` rows.

    layers: those with a window. lasting: how many of them keep their rows until the step ends.

    Between two steps each layer has a page that it does not use. In a chunk, the layer that runs and the lasting ones
    each take up to `new - 1` pages more. Several prompts in one step need no more than one that is as long.
    """
    new = -(-(CHUNK - 1 + bucket) // CHUNK)  # pages behind the window, with up to 63 settled rows
    at_once = min(lasting + 1, layers)
    return max(0, at_once * (new - 1) - layers) * CHUNK


class WindowPages(KvCache):
    """`[pages, parts, KV, 64, hd]`, zeroed: pages of keys and values, which move along with the windows of their slots.

    Kernels see keys and values as two tensors `[2 pages - 1, KV, 64, hd]` of the same memory. The second one begins
    where the values of the first page are. So a page has an even number there, which is the same in both.

    table: int32, the tables of all layers on the device. A layer's table is `[slots, pages of a slot]`, at an address
    that stays. An entry whose page was taken away keeps its old number. No kernel reads through it.
    """

    page = CHUNK
    table: Tensor

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int, int, int],
        *,
        window: int,
        bucket: int,
        lasting: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """window, bucket: rows of a window, and of the widest step. lasting: indices of layers."""
        slots = shape[0]
        self._pages_per_slot = own = len(names) * count_window_rows(window) // CHUNK  # for all layers
        shared = count_shared_rows(bucket, len(names), len(lasting)) // CHUNK
        super().__init__(names, shape, dtype=dtype, device=device, pages=slots * own + shared)
        numbers = [*range(0, 2 * self.pages, 2)]  # of all pages, as tables have them
        self._unused = [numbers[slot * own : (slot + 1) * own] for slot in range(slots)]
        self._shared = numbers[slots * own :]
        self._held = [range(0)] * slots  # the parts of each slot's rows that have pages, in all layers
        self._lasting = frozenset(lasting)

    def _allocate_rows(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        layers, parts, slots, heads, rows, width = shape
        most = -(-rows // self.page)  # of a slot
        entries = slots * most
        self._memory = None
        self._all = torch.zeros(self.pages, parts, heads, self.page, width, dtype=dtype, device=device)
        self.table = torch.zeros(layers, -(-entries // ALIGNED) * ALIGNED, dtype=torch.int32, device=device)
        self._tables = torch.unflatten(self.table[:, :entries], 1, (slots, most))
        self._layer_tables = [*self._tables]  # of each layer
        self._numbers = np.zeros((layers, slots, most), np.int32)  # the same on the host

    def _open_layers(self) -> list[tuple[Tensor, Tensor]]:
        halves = self._all.flatten(0, 1)
        return [(halves[:-1], halves[1:])] * len(self._numbers)

    @property
    def nbytes(self) -> int:
        return self._all.nbytes + self.table.nbytes

    # --- pages ---

    def make_room(self, slot: int, start: int, stop: int) -> None:
        """Give the slot pages for rows `[start, stop)` in every layer.

        The pages that it already has must be for rows of this range. The new ones are those that belong to the slot
        and are not in use (`_unused`). No other slot gives up any.
        """
        wanted = self._find_pages(start, stop)
        held = self._held[slot]
        if wanted == held:
            return
        new = [number - wanted.start for number in wanted if number not in held]
        numbers = self._numbers[:, slot, wanted.start : wanted.stop].copy()
        unused = self._unused[slot]
        left = len(unused) - len(numbers) * len(new)
        assert len(held) + len(new) == len(wanted), f"slot {slot} has pages outside {wanted}: {held}"
        assert left >= 0, f"slot {slot} has no room for rows {start}..{stop}"
        numbers[:, new] = np.reshape(unused[left:], (len(numbers), len(new)))
        self._write_tables(slot, wanted, numbers)
        self._held[slot] = wanted
        del unused[left:]

    def move_window(self, slot: int, start: int, stop: int, later: int) -> None:
        """Give the slot pages for a chunk that ends at row `stop`, layer by layer in the order in which they run.

        start, later: the first row that the slot keeps before the chunk, and behind it. While a layer runs, it has
        pages for rows `[start, stop)`; what it does not keep is for the layers behind it. The slot has pages for rows
        `[later, stop)` when this returns. If this raises, the slot has the pages that it had.
        """
        during = self._find_pages(start, stop)
        after = self._find_pages(later, stop)
        numbers = self._numbers[:, slot, during.start : during.stop].copy()
        held = self._held[slot]
        assert not held or held.start == during.start, (
            f"slot {slot} has pages {held} before a chunk that needs {during}"
        )
        first_new = len(held)
        gone = after.start - during.start
        unused = self._unused[slot].copy()
        shared = self._shared.copy()
        late = list[int]()
        for layer, layer_pages in enumerate(numbers):
            layer_pages[first_new:] = [unused.pop() if unused else shared.pop() for _ in range(first_new, len(during))]
            (late if layer in self._lasting else unused).extend(layer_pages[:gone].tolist())
        self._write_tables(slot, during, numbers)
        self._held[slot] = after
        self._unused[slot] = unused + late
        self._shared = shared

    def keep_only(self, slot: int, start: int, stop: int) -> None:
        """Take the pages of rows outside `[start, stop)` away. Pages beyond the slot's own number are shared again."""
        held = self._held[slot]
        wanted = self._find_pages(start, stop)
        kept = range(max(held.start, wanted.start), min(held.stop, wanted.stop)) or range(0)
        unused = self._unused[slot]
        if kept != held:
            gone = [number for number in held if number not in kept]
            unused += self._numbers[:, slot, gone].flatten().tolist()
            self._held[slot] = kept
        if (excess := len(unused) + len(self._numbers) * len(kept) - self._pages_per_slot) > 0:
            self._shared += unused[-excess:]
            del unused[-excess:]

    def _find_pages(self, start: int, stop: int) -> range:
        return range(start // self.page, -(-stop // self.page)) if start < stop else range(0)

    def _write_tables(self, slot: int, part: range, numbers: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> None:
        """Write the pages of a part of the slot's rows, `[layers, pages]`. The host does not wait for the device."""
        given = torch.from_numpy(numbers)
        if self.table.is_cuda:
            given = given.pin_memory().to(self.table.device, non_blocking=True)
        self._tables[:, slot, part.start : part.stop] = given
        self._numbers[:, slot, part.start : part.stop] = numbers

    # --- rows ---

    def find_table(self, layer: int) -> Tensor:
        return self._layer_tables[layer]

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        raise ValueError(f"rows {start}..{stop} of slot {slot} are in other pages in each layer")

    def view_layer(self, layer: int, slot: int, start: int, stop: int) -> Tensor:
        number, first = divmod(start, self.page)
        return self._all[int(self._numbers[layer, slot, number]) // 2, :, :, first : first + stop - start]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        return split_by_pages(start, stop, self.page)

    def put(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        self.put_bytes(layer, slot, start, torch.stack((keys, values)))

    def read(self, layer: int, slot: int, start: int, stop: int) -> Tensor:
        pages = self._find_pages(start, stop)
        index = self._tables[layer, slot, pages.start : pages.stop]
        found = torch.stack([part.index_select(0, index) for part in self.layers[layer]])
        first = start - pages.start * self.page
        return found.transpose(1, 2).flatten(2, 3)[:, :, first : first + stop - start]

    def fill_pages(self, layer: int, slot: int, start: int, rows: Tensor) -> None:
        """Write rows of one layer from `start` on, `[parts, KV, rows, hd]`. Other rows of their pages become zeros."""
        parts, heads, count, width = rows.shape
        pages = self._find_pages(start, start + count)
        index = self._tables[layer, slot, pages.start : pages.stop].long()
        whole = rows.new_zeros(parts, heads, len(pages) * self.page, width)
        first = start - pages.start * self.page
        whole[:, :, first : first + count] = rows
        paged = torch.unflatten(whole, 2, (len(pages), self.page)).transpose(1, 2)
        for part, part_pages in zip(self.layers[layer], paged, strict=True):
            part.index_copy_(0, index, part_pages)

    def copy_span(self, source: int, target: int, start: int, stop: int) -> None:
        for layer in range(len(self.layers)):
            self.fill_pages(layer, target, start, self.read(layer, source, start, stop))
