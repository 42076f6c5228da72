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
* On a GPU a slot's rows lie in pages of 64 rows, which tables list (`window_pages.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.cache.recurrent_cache import check_state, hold_memory
from adapters.models.decoder.cache.window_pages import WindowPages, count_window_rows
from adapters.models.decoder.shard import Kept, NamedTensors
from adapters.models.kernels.interfaces.delta_interface import CHUNK
from adapters.models.kernels.step import UNSETTLED, Segment, Step
from adapters.sequence_layout import TensorSpec

_NOTHING = nullcontext()


def find_span(part: Sequence[Segment]) -> Segment:
    """Return the span of positions that the segments of one slot cover. The pieces of a tree share positions."""
    start = part[0].start
    return Segment(part[0].slot, start, max(segment.start + segment.count for segment in part) - start)


@frozen
class WindowShape:
    """The rows of the layers with a window: key heads, numbers of a head, and the window, alike in all of them.

    tree_obstacle: why steps cannot have trees, as in `PositionalStates`. lasting: indices of the layers whose rows are
    read after their own attention, until a step ends.
    """

    heads: int
    width: int
    window: int
    tree_obstacle: str = ""
    lasting: tuple[int, ...] = ()


class WindowMemory(KvCache):
    """Rows in host memory. Rows before a slot's window give their memory back, in a chunk layer by layer."""

    page = CHUNK

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int, int, int],
        *,
        lasting: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """lasting: as in `WindowPages`."""
        super().__init__(names, shape, dtype=dtype, device=device)
        self._held = [range(0)] * shape[0]  # for each slot the pages that may have memory
        self._leaving = dict[int, range]()  # for each slot in a chunk the pages that no layer needs once it has run
        self._lasting = frozenset(lasting)

    def make_room(self, slot: int, start: int, stop: int) -> None:
        """Note that these rows will have memory. It comes as they are written. No row loses its memory here."""
        held = self._held[slot]
        first = min(held.start, start // self.page) if held else start // self.page
        self._held[slot] = range(first, max(held.stop, -(-stop // self.page)))

    def move_window(self, slot: int, start: int, stop: int, later: int) -> None:
        """Make room for a chunk that ends at row `stop`. start, later: as in `WindowPages.move_window`."""
        self.make_room(slot, start, stop)
        self._leaving[slot] = range(self._held[slot].start, later // self.page)

    def finish_layer(self, layer: int) -> None:
        """Give the memory of rows back that a layer needs no more once it has run."""
        if layer not in self._lasting:
            for slot, gone in self._leaving.items():
                self._give_back(((slot, number) for number in gone), range(layer, layer + 1))

    def fill_pages(self, layer: int, slot: int, start: int, rows: Tensor) -> None:
        """Write rows of one layer from `start` on, `[parts, KV, rows, hd]`."""
        self.put_bytes(layer, slot, start, rows)

    def keep_only(self, slot: int, start: int, stop: int) -> None:
        """Give the memory of rows outside `[start, stop)` back."""
        held = self._held[slot]
        kept = range(max(held.start, start // self.page), min(held.stop, -(-stop // self.page)))
        self._give_back((slot, number) for number in held if number not in kept)
        self._held[slot] = kept or range(0)
        self._leaving.pop(slot, None)


class WindowRows:
    """The rows of layers with a window, of every slot, and `checkpoint_count` for more states.

    layers: keys and values of each layer, as kernels read them. A table of pages belongs to them on a GPU.
    """

    block = CHUNK
    commits_per_segment = False
    survives_failure = False

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
            self._rows = WindowPages(
                names,
                size,
                window=shape.window,
                bucket=bucket,
                lasting=shape.lasting,
                dtype=dtype,
                device=device,
            )
        else:
            self._rows = WindowMemory(names, size, lasting=shape.lasting, dtype=dtype, device=device)
        self.specs: tuple[TensorSpec, ...] = self._rows.spec.tensor_specs(shape.window)
        kept = (checkpoint_count, len(names), 2, shape.heads, shape.window, shape.width)
        self._kept = torch.zeros(kept, dtype=dtype, device=device)
        self._bases = [0] * checkpoint_count
        self._settled = [(0, 0)] * slots  # base, and settled rows

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return self._rows.layers

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
        bases = tuple(self._settled[segment.slot][0] for segment in step.segments)
        with self.restoring(step):
            for span in spans:
                self._make_room(step, span)
        return bases

    def _make_room(self, step: Step, span: Segment) -> None:
        """Make room for new rows of a slot. During a chunk the slot has no state, since layers move their windows."""
        first = self._first_row(span.slot)
        stop = span.start + span.count
        if step.settles(span):
            self._settled[span.slot] = (0, 0)
            self._rows.move_window(span.slot, first, stop, self._find_first(stop))
        else:
            self._rows.make_room(span.slot, first, stop)

    def settling(self, step: Step) -> AbstractContextManager[None]:
        """Return a context for a forward. All rows of a step of rows only are settled when it ends."""
        return self._settling(step) if any(map(step.settles, step.segments)) else _NOTHING

    def restoring(self, step: Step) -> AbstractContextManager[None]:
        """Return a context in which a step of rows only takes the states of its slots with it if it fails, here or in
        a later shard: the windows before it are gone.
        """
        return self._restoring(step) if any(map(step.settles, step.segments)) else _NOTHING

    @contextmanager
    def _settling(self, step: Step) -> Iterator[None]:
        with self._restoring(step):
            yield
            for segment in filter(step.settles, step.segments):
                self._settle(segment.slot, segment.start + segment.count)

    @contextmanager
    def _restoring(self, step: Step) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for segment in filter(step.settles, step.segments):
                self._settle(segment.slot, 0)
            raise

    def finish_layer(self, layer: int) -> None:
        """Note that a layer's attention has run. layer: its index in `layers`."""
        if isinstance(self._rows, WindowMemory):
            self._rows.finish_layer(layer)

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
        """Return the first row that the slot keeps."""
        return self._find_first(self._settled[slot][1])

    def _find_first(self, settled: int) -> int:
        """Return the first row that a slot keeps which has this many settled rows."""
        return max(0, settled - settled % CHUNK - self._window)

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
        rows = base - first
        window[..., : self._window - rows, :] = 0
        for layer in range(len(window) if rows else 0):
            window[layer, ..., self._window - rows :, :].copy_(self._rows.read(layer, slot, first, base))

    def _put(self, slot: int, window: Tensor, base: int) -> None:
        """Let the slot have `base` settled rows, with the window before them taken from `window`."""
        self._settle(slot, base)
        first = self._first_row(slot)
        self._rows.make_room(slot, first, base)
        rows = base - first
        for layer in range(len(window) if rows else 0):
            self._rows.fill_pages(layer, slot, first, window[layer, ..., self._window - rows :, :])

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
