"""The rows of layers with a window, as positional state of a slot: `PositionalStates` for a `DenseShard`.

The problem: a layer with a window never reads a row that lies further back than its window. Memory and files for such
rows would be wasted, and in most models with windows most layers have one.

The idea: what is before the window cannot be had back, so these rows are positional state like that of a recurrent
layer. A slot with n settled rows keeps those from `base - window` on, where base is the last multiple of 64 up to n. A
state that is exported, kept in a checkpoint or stored belongs to such a base. It consists of the last `window` rows
before it; rows before the sequence's first one are zeros. So a restart reads all rows of the other layers, and of these
layers one window.

Example: a slot has n = 1,000 settled rows, and the window is 512. Its base is 960, so it keeps rows 448 to 999. Its
state consists of rows 448 to 959. The slot may go on from any row from 960 to 1,000.

Rows have the same positions in a slot as in the sequence, so kernels read them as they read all rows. Where they are:

* In host memory a slot has addresses for all of its rows, and rows before the window give their memory back.
* On a GPU a slot's rows lie in pages of 64 rows, which a table lists. A page that is before the window becomes the
  page of rows to come. A wide step takes pages that all slots share, and returns the same number (not the same pages)
  when it is settled. Only wide steps take shared pages, and they run one after the other, so no two streams ever use
  one page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache, PagedKvCache
from adapters.models.decoder.cache.recurrent_cache import check_state, hold_memory
from adapters.models.decoder.shard import Kept, NamedTensors
from adapters.models.kernels.interfaces.delta_interface import CHUNK
from adapters.models.kernels.step import UNSETTLED, Segment, Step
from adapters.sequence_layout import TensorSpec

_NOTHING = nullcontext()


def count_window_rows(window: int) -> int:
    """Return the rows that a slot has room for: its window in whole pages, settled rows behind it, and a narrow step.

    The span begins `window` rows before a multiple of 64. Up to 63 settled rows and 64 new ones are behind that
    multiple. A page has 64 rows, as few as a tile of keys, so little of it lies before the window.
    """
    return (-(-window // CHUNK) + 2) * CHUNK


def count_shared_rows(bucket: int) -> int:
    """Return the rows that all slots share, for steps of up to this many rows: those that a slot has no room for.

    A slot has two pages behind its window. Several prompts in one step need no more than one that is as long.
    """
    return max(0, -(-(CHUNK - 1 + bucket) // CHUNK) - 2) * CHUNK


def find_span(part: Sequence[Segment]) -> Segment:
    """Return the span of positions that the segments of one slot cover. The pieces of a tree share positions."""
    start = part[0].start
    return Segment(part[0].slot, start, max(one.start + one.count for one in part) - start)


@frozen
class WindowShape:
    """The rows of the layers with a window: key heads, numbers of a head, and the window, alike in all of them.

    tree_obstacle: why steps cannot have trees, as in `PositionalStates`.
    """

    heads: int
    width: int
    window: int
    tree_obstacle: str = ""


class WindowPages(PagedKvCache):
    """Rows in pages that move along with the windows of their slots.

    `_pages[slot][i]` is the page of rows 64 i to 64 i + 63; 0 if none. An entry whose page was taken away keeps its old
    number. No kernel reads through either.
    """

    page = CHUNK

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int, int, int],
        *,
        own: int,
        shared: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """own, shared: pages of each slot, and of all slots together."""
        slots = shape[0]
        super().__init__(names, shape, dtype=dtype, device=device, pages=slots * own + shared)
        self._own = own
        self._pages = [[0] * len(pages) for pages in self._pages]
        self.table.zero_()
        self._unused_pages = [list(range(slot * own, (slot + 1) * own)) for slot in range(slots)]
        self._shared = list(range(slots * own, self.pages))
        self._placed: list[dict[int, int]] = [{} for _ in range(slots)]

    def make_room(self, slot: int, start: int, stop: int) -> None:
        """Take the pages of all rows before `start` away, then give the slot pages for rows `[start, stop)`."""
        first = start // self.page
        placed = self._placed[slot]
        unused = self._unused_pages[slot]
        for number in [number for number in placed if number < first]:
            unused.append(placed.pop(number))
        new = [number for number in range(first, -(-stop // self.page)) if number not in placed]
        for number in new:
            placed[number] = self._pages[slot][number] = unused.pop() if unused else self._shared.pop()
        if new:
            listed = self._pages[slot][new[0] : new[-1] + 1]
            self.table[slot, new[0] : new[-1] + 1] = torch.tensor(listed, dtype=torch.int32)

    def keep_only(self, slot: int, start: int, stop: int) -> None:
        """Take the pages of rows outside `[start, stop)` away, and share those that the slot has too many."""
        placed = self._placed[slot]
        unused = self._unused_pages[slot]
        for number in [number for number in placed if not start // self.page <= number < -(-stop // self.page)]:
            unused.append(placed.pop(number))
        while len(placed) + len(unused) > self._own:
            self._shared.append(unused.pop())


class WindowMemory(KvCache):
    """Rows in host memory. Rows before a slot's window give their memory back."""

    page = CHUNK

    def __init__(
        self, names: Sequence[str], shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(names, shape, dtype=dtype, device=device)
        self._held = [range(0)] * shape[0]  # for each slot the pages that may have memory

    def make_room(self, slot: int, start: int, stop: int) -> None:
        """Note that these rows will have memory. It comes as they are written. No row loses its memory here."""
        held = self._held[slot]
        first = min(held.start, start // self.page) if held else start // self.page
        self._held[slot] = range(first, max(held.stop, -(-stop // self.page)))

    def keep_only(self, slot: int, start: int, stop: int) -> None:
        """Give the memory of rows outside `[start, stop)` back."""
        held = self._held[slot]
        kept = range(max(held.start, start // self.page), min(held.stop, -(-stop // self.page)))
        self._give_back((slot, number) for number in held if number not in kept)
        self._held[slot] = kept or range(0)


class WindowRows:
    """The rows of layers with a window, of every slot, and `checkpoint_count` for more states.

    layers: keys and values of each layer, as kernels read them; table: the pages of them, if there are any.
    """

    block = CHUNK
    commits_per_segment = False

    def __init__(
        self,
        names: Sequence[str],
        shape: WindowShape,
        *,
        slots: int,
        checkpoint_count: int,
        rows: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        paged: bool,
    ) -> None:
        """rows: of a slot at most, and of the widest step."""
        capacity, bucket = rows
        self.slots = slots
        self.checkpoint_count = checkpoint_count
        self.tree_obstacle = shape.tree_obstacle
        self._window = shape.window
        size = (slots, shape.heads, capacity, shape.width)
        self._rows: WindowPages | WindowMemory
        if paged:
            own = count_window_rows(shape.window) // CHUNK
            shared = count_shared_rows(bucket) // CHUNK
            self._rows = WindowPages(names, size, own=own, shared=shared, dtype=dtype, device=device)
        else:
            self._rows = WindowMemory(names, size, dtype, device)
        self.specs: tuple[TensorSpec, ...] = self._rows.spec.tensor_specs(shape.window)
        kept = (checkpoint_count, len(names), 2, shape.heads, shape.window, shape.width)
        self._kept = torch.zeros(kept, dtype=dtype, device=device)
        self._bases = [0] * checkpoint_count
        self._settled = [(0, 0)] * slots  # base, and settled rows

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return self._rows.layers

    @property
    def table(self) -> Tensor | None:
        return self._rows.table

    @property
    def cache(self) -> KvCache:
        """The rows of all slots. Those outside a slot's window have no memory."""
        return self._rows

    @property
    def nbytes(self) -> int:
        rows = self._rows
        own = self.slots * count_window_rows(self._window) * rows.spec.token_bytes
        return self._kept.nbytes + (rows.nbytes if isinstance(rows, WindowPages) else own)

    # --- steps ---

    def start(self, step: Step) -> tuple[int, ...]:
        """Return the base of each segment's slot, and forget the slot's rows from the segment's start on.

        Raises ValueError for a step that cannot continue from there.
        """
        if step.branches and self.tree_obstacle:
            raise ValueError(f"a tree: {self.tree_obstacle}")
        spans = [find_span(part) for part in step.parts]
        for span in spans:
            base, settled = self._settled[span.slot]
            if span.start and not base <= span.start <= settled:
                raise ValueError(
                    f"slot {span.slot} has its window at {base}, with {settled - base} rows after it; "
                    f"nothing continues from {span.start}"
                )
            if span.count > UNSETTLED and not step.rows_only:
                rows = f"{span.count} rows of slot {span.slot}"
                raise ValueError(f"{rows} in a step that may be rolled back; accepted: at most {UNSETTLED}")
        for span in spans:
            self._settle(span.slot, span.start)
            self._rows.make_room(span.slot, self._first_row(span.slot), span.start + span.count)
        return tuple(self._settled[segment.slot][0] for segment in step.segments)

    def settling(self, step: Step) -> AbstractContextManager[None]:
        """Return a context for a forward. All rows of a step of rows only are settled when it ends."""
        return self._settling(step) if any(map(step.settles, step.segments)) else _NOTHING

    def restoring(self, step: Step) -> AbstractContextManager[None]:
        """Return a context that forgets the rows of a step of rows only if it fails, here or in a later shard."""
        return self._restoring(step) if any(map(step.settles, step.segments)) else _NOTHING

    @contextmanager
    def _settling(self, step: Step) -> Iterator[None]:
        with self._restoring(step):
            yield
            for one in filter(step.settles, step.segments):
                self._settle(one.slot, one.start + one.count)

    @contextmanager
    def _restoring(self, step: Step) -> Iterator[None]:
        before = [self._settled[one.slot] for one in step.segments]
        try:
            yield
        except BaseException:
            for one, settled in zip(step.segments, before, strict=True):
                self._settled[one.slot] = settled
            raise

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        for (segment, *_), keep in zip(step.parts, kept, strict=True):
            if step.settles(segment):
                continue
            self._settle(segment.slot, segment.start + (keep if isinstance(keep, int) else len(keep)))

    def _settle(self, slot: int, rows: int) -> None:
        """Let the slot have this many settled rows, and give back what is before its window or after them."""
        self._settled[slot] = (rows - rows % CHUNK, rows)
        self._rows.keep_only(slot, self._first_row(slot), rows)

    def _first_row(self, slot: int) -> int:
        return max(0, self._settled[slot][0] - self._window)

    # --- states ---

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` continue from wherever slot `source` may continue."""
        if source == target:
            return
        _, rows = self._settled[source]
        first = self._first_row(source)
        self._settle(target, rows)
        self._rows.make_room(target, first, rows)
        if first < rows:
            self._rows.copy_span(source, target, first, rows)

    def keep(self, slot: int, checkpoint: int) -> None:
        self._take(slot, self._kept[self._check_number(checkpoint)])
        self._bases[checkpoint] = self._settled[slot][0]

    def load(self, checkpoint: int, slot: int) -> None:
        self._put(slot, self._kept[self._check_number(checkpoint)], self._bases[checkpoint])

    def _check_number(self, checkpoint: int) -> int:
        if not 0 <= checkpoint < self.checkpoint_count:
            raise ValueError(f"checkpoint {checkpoint} is not one of {self.checkpoint_count}")
        return checkpoint

    def _take(self, slot: int, window: Tensor) -> None:
        """Copy the rows before the slot's base to `[layers, 2, heads, window, width]`."""
        base = self._settled[slot][0]
        first = self._first_row(slot)
        window[..., : self._window - (base - first), :] = 0
        for start, stop in self._rows.spans(first, base):
            at = self._window - (base - start)
            window[..., at : at + stop - start, :].copy_(self._rows.view(slot, start, stop))

    def _put(self, slot: int, window: Tensor, base: int) -> None:
        """Let the slot have `base` settled rows, with the window before them taken from `window`."""
        self._settle(slot, base)
        first = self._first_row(slot)
        self._rows.make_room(slot, first, base)
        for start, stop in self._rows.spans(first, base):
            at = self._window - (base - start)
            self._rows.view(slot, start, stop).copy_(window[..., at : at + stop - start, :])

    def export(self, slot: int) -> NamedTensors:
        """Return the window before the slot's base, on its device."""
        window = self._kept.new_empty(self._kept.shape[1:])
        self._take(slot, window)
        return dict(zip(self._rows.spec.names, window.flatten(0, 1), strict=True))

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        """Write a window that `export` returned. Raises ValueError for another name, shape or dtype."""
        check_state(self.specs, state, at)
        given = [state[spec.name] for spec in self.specs]
        self._put(slot, torch.stack(given).view(self._kept.shape[1:]), at)
        hold_memory(given)

    def close(self) -> None:
        """Give the memory back."""
        self._rows.close()
        self._kept = self._kept.new_empty(0)
