"""Takes rows of a slot out into the store beside the lane, positional state on it; writing is the store's part.

While a snapshot is taken its slot is the request's alone and nobody changes its rows, so a thread of its own may read
them. The lane only says what the slot holds, and marks where its device has got to: copies come behind that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from attrs import define, field, frozen

from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.store.disk_tier import Disk
from adapters.store.files.file_format import Run
from adapters.store.slab_memory import Buffer
from adapters.store.store import Store
from adapters.transfer.copy_rows import Marks, Mover, StateMover, marks
from adapters.transfer.fence import Serving
from effects.ids import DeviceFailed, RequestId, SlotId, Span, StoreFailed
from effects.ports import RowsLost
from effects.snapshot import SaveSnapshot, SnapshotSaved

T = TypeVar("T")
log = logging.getLogger("rekindle.store")

PATIENCE_NS = (
    2_000_000_000  # for one snapshot: 32k tokens of an 8B model take a tenth of it, and the slot waits so long
)
LOOK_S = 0.002  # until it is seen again whether a first token is still awaited
MOMENT = 5  # looks: behind an answer's end its client often asks for the next one at once
COURTESY = 125  # looks: in all
PAUSE_S = 0.005  # until it is seen again whether memory has come free: a disk takes in 32 MB in six times as long


@frozen
class SlotFound:
    """A slot, as the lane has found it. there: does it still have those rows; asked on the lane. salt: of whom they
    are. drafted: those that a draft has its own for.
    """

    slot: SlotId
    there: Callable[[], bool]
    salt: str
    drafted: Span
    after: Marks


@define
class SnapshotDelay:
    """What one snapshot still has of it. quiet: looks in a row that found nobody who waits for a first token."""

    left: int = COURTESY
    quiet: int = 0


@define(eq=False)
class Saver:
    """catch_up: lets a draft follow the rows of a slot that it was spared so far, before they are kept. hurried: does
    anybody wait for a slot? reading: for a first token, otherwise? Both asked on any thread.
    """

    store: Store[Disk]
    lane: DeviceLane
    serving: Serving
    target: Sequence[Mover]
    draft: Sequence[Mover]
    state: StateMover
    catch_up: Callable[[int], object] = lambda _: None
    clock_ns: Callable[[], int] = time.monotonic_ns
    hurried: Callable[[], bool] = lambda: True
    reading: Callable[[], bool] = lambda: False
    worker: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "store-save"))
    _asked: int = field(init=False, default=0)  # snapshots that are being taken, or wait for that

    # --- called on the event loop ---

    async def save(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSaved | StoreFailed:
        """Copy out what no tier has, and leave the rest to the background."""
        found = await self.lane.run(partial(self._begun, request, effect))
        if isinstance(found, StoreFailed):
            return found
        taking = partial(self._taken, effect, found)
        self._asked += 1
        try:
            rows, saved = await asyncio.get_running_loop().run_in_executor(self.worker, taking)
        finally:
            self._asked -= 1
        log.info("request %d: %d tokens kept, %d bytes of them new", request, rows, saved, extra={"request": request})
        return SnapshotSaved(rows, saved)

    def close(self) -> None:
        """What is being taken still is."""
        self.worker.shutdown()

    # --- called on the lane ---

    def _begun(self, request: RequestId, effect: SaveSnapshot) -> SlotFound | StoreFailed:
        self.catch_up(effect.slot)
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        if not state.holds(effect.tokens):
            return StoreFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        if effect.checkpoint:
            self.checkpoint(request, effect.slot, len(effect.tokens))

        def there() -> bool:
            return self.serving(effect.slot, request) is state

        return SlotFound(effect.slot, there, state.salt, state.draft_rows, marks(self.lane.devices))

    def checkpoint(self, request: RequestId, slot: SlotId, at: int) -> bool:
        """Where the slot's state stands behind rows `[0, at)`: keep it. False if that was not possible."""
        state, layout = self.serving(slot, request), self.store.layout
        if isinstance(state, DeviceFailed) or not layout.state:
            return False
        if self.state.standing(state.valid) != at or at % layout.block_size or not at:
            where = request, slot, state.valid, at
            log.warning("request %d: slot %d has %d rows, no checkpoint at %d", *where, extra={"request": request})
            return False
        tokens = tuple(state.tokens[:at])
        if not self.store.lacks_checkpoint(tokens, state.salt):
            return True
        try:
            buffer = self.store.memory.take(layout.size("state", 0))
            self.state.take(slot, buffer.data)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            about = {"request": request}
            log.warning("request %d: no memory for the checkpoint at %d: %s", request, at, error, extra=about)
            return False
        return self.store.keep_checkpoint(tokens, buffer, state.salt)

    # --- called on a thread of its own ---

    def _taken(self, effect: SaveSnapshot, found: SlotFound) -> tuple[int, int]:
        """How many rows, from the first on, are kept now, and the bytes that are new."""
        end, tokens, saved = self.clock_ns() + PATIENCE_NS, effect.tokens, 0
        courtesy = SnapshotDelay()
        for run, movers in self._gaps(effect, found):
            self._give_way(courtesy)
            late = saved > 0 and self.clock_ns() > end
            size = None if late else self._take(found, run, movers, end)
            if size is None:
                why = "no time" if late else "no room"
                log.info("slot %d: %s for %s %d..%d", effect.slot, why, run.kind, run.start, len(tokens) - 1)
                self.store.dropped_rows += len(tokens) - run.start
                return (run.start if run.kind == "rows" else len(tokens)), saved
            saved += size
        return len(tokens), saved

    def _give_way(self, courtesy: SnapshotDelay) -> None:
        """To first tokens: copies take memory's speed from them, and what Python does for these the interpreter."""
        while courtesy.left and not self.hurried():
            courtesy.quiet = 0 if self.reading() else courtesy.quiet + 1
            if courtesy.quiet > MOMENT:
                return
            courtesy.left -= 1
            time.sleep(LOOK_S)

    def _gaps(self, effect: SaveSnapshot, found: SlotFound) -> Iterator[tuple[Run, Sequence[Mover]]]:
        for run in self.store.gaps(effect.tokens, salt=found.salt):
            yield run, self.target
        if self.draft:
            start, stop = found.drafted
            for run in self.store.gaps(effect.tokens[:stop], "draft", start, found.salt):
                yield run, self.draft

    def _take(self, found: SlotFound, run: Run, movers: Sequence[Mover], end: int) -> int | None:
        """The bytes of it; None if there was room nowhere."""
        try:
            buffer = self._room(self.store.layout.size(run.kind, run.length), end)
            for mover in movers:
                work = partial(mover.take, found.slot, (run.start, run.stop), buffer.data, found.after)
                work() if mover.anywhere else self._on_the_lane(work, found)
        except Exception as error:
            gone = run.kind == "draft" and isinstance(error, RowsLost)  # which is no reason to lose anything else
            if not (gone or is_out_of_memory(error)):
                raise
            return None
        return buffer.data.nbytes if self.store.keep(run, buffer) else None

    def _room(self, size: int, end: int) -> Buffer:
        """Pinned memory, where there is such. More is made than a start had time for, unless other snapshots wait for
        their turn and a request for a slot; and what is in it, which goes to the disk, is waited for, unless other
        snapshots wait. Raises MemoryError.
        """
        before = True  # what has just been written is given back a moment later
        while True:
            writing, alone = self.store.disk is not None and self.store.disk.queued > 0, self._asked <= 1
            try:
                return self.store.memory.take(size, held=True, more=alone or not self.hurried())
            except MemoryError:
                if not alone or not (writing or before) or self.clock_ns() > end:
                    raise
            before = writing
            time.sleep(PAUSE_S)

    def _on_the_lane(self, work: Callable[[], T], found: SlotFound) -> T:
        """One run at a time, between whatever else it does. A process that was lost meanwhile, and is there again, has
        rows of nobody's under the same number. Raises RowsLost.
        """

        def taken() -> T:
            if not found.there():
                raise RowsLost((), f"slot {found.slot} has lost the rows that were to be kept")
            return work()

        done = Future[T]()
        self.lane.post(lambda: done.set_result(taken()), done.set_exception)
        return done.result()
