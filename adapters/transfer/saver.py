"""Copies rows of a slot out into the store when a request is over, without holding up the device lane.

The problem: what a slot holds must be copied to host memory before the slot is opened for another request. The copy
takes as long as some decode steps, the lane computes for other requests meanwhile, and first tokens must not wait.

How a snapshot is taken (`Saver.save`):

1. On the lane (`_prepare`): check that the slot holds the rows, let the draft catch up, save the positional state if a
   checkpoint was asked for, and record a mark behind everything that each GPU has been given.
2. On the saver's own thread (`_copy_missing_runs`): ask the store which runs no tier has, and copy one run after the
   other into memory of the store. Copies on a GPU come behind the marks. A part that cannot be addressed from here (a
   shard in another process) is copied on the lane, one run at a time.
3. Each run is given to the store, which queues it for the lower tiers.

Invariants: until the snapshot is answered, its slot belongs to the request and no row of it changes, so another thread
may read them. Rows are kept from the first one on without a gap: when time or memory ends, the rest is dropped and
counted (`Store.dropped_rows`). There is one saver thread, so snapshots are taken one after the other.

Between two runs the thread lets requests that wait for a first token go first (`_wait_for_first_tokens`), for at most
MAX_POLLS * POLL_S = 0.25 s in all, unless a request waits for a slot.
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
from adapters.store.files.file_format import Run
from adapters.store.slab_memory import Buffer
from adapters.store.store import Store
from adapters.store.tier import ReadableTier
from adapters.transfer.copy_rows import DeviceMarks, RowMover, StateMover, record_marks
from adapters.transfer.fence import SlotFinder
from effects.ids import DeviceFailed, RequestId, SlotId, Span, StoreFailed
from effects.ports import RowsLost
from effects.snapshot import SaveSnapshot, SnapshotSaved

T = TypeVar("T")
log = logging.getLogger("rekindle.store")

MAX_SNAPSHOT_NS = (
    2_000_000_000  # for one snapshot: 32k tokens of an 8B model take a tenth of it, and the slot waits so long
)
POLL_S = 0.002  # between two looks at whether a first token is still pending
QUIET_POLLS = 5  # a client often sends its next request as soon as an answer ends
MAX_POLLS = 125  # 0.25 s for one snapshot
PAUSE_S = 0.005  # between two looks for free memory: a disk writes 32 MB in six times as long


@frozen
class SlotSnapshot:
    """The lane's answer about a slot. is_current: whether it still has those rows; called on the lane. salt: the
    scope that its rows belong to. draft_span: the rows that the draft has its own for.
    """

    slot: SlotId
    is_current: Callable[[], bool]
    salt: str
    draft_span: Span
    marks: DeviceMarks


@define
class SnapshotDelay:
    """The time that one snapshot may still wait. quiet_polls.

    Polls in a row in which no request waited for a first token.
    """

    polls_left: int = MAX_POLLS
    quiet_polls: int = 0


@define(eq=False)
class Saver:
    """Takes snapshots. catch_up: lets a draft compute its rows for those of a slot, before they are kept; on the lane.
    is_slot_requested, is_first_token_pending: what requests wait for; called on the saver's thread.
    """

    store: Store[ReadableTier]
    lane: DeviceLane
    find_slot: SlotFinder
    target: Sequence[RowMover]
    draft: Sequence[RowMover]
    state: StateMover
    catch_up: Callable[[int], object] = lambda _: None
    clock_ns: Callable[[], int] = time.monotonic_ns
    is_slot_requested: Callable[[], bool] = lambda: True
    is_first_token_pending: Callable[[], bool] = lambda: False
    worker: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "store-save"))
    _pending_snapshots: int = field(init=False, default=0)  # snapshots that are being taken, or wait for that

    # --- called on the event loop ---

    async def save(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSaved | StoreFailed:
        """Copy out what no tier has. Lower tiers write it later, in the background."""
        found = await self.lane.run(partial(self._prepare, request, effect))
        if isinstance(found, StoreFailed):
            return found
        taking = partial(self._copy_missing_runs, effect, found)
        self._pending_snapshots += 1
        try:
            rows, saved = await asyncio.get_running_loop().run_in_executor(self.worker, taking)
        finally:
            self._pending_snapshots -= 1
        log.info("request %d: kept %d tokens, wrote %d new bytes", request, rows, saved, extra={"request": request})
        return SnapshotSaved(rows, saved)

    def close(self) -> None:
        """Wait for the snapshots that are being taken."""
        self.worker.shutdown()

    # --- called on the lane ---

    def _prepare(self, request: RequestId, effect: SaveSnapshot) -> SlotSnapshot | StoreFailed:
        self.catch_up(effect.slot)
        state = self.find_slot(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        if not state.holds(effect.tokens):
            return StoreFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        if effect.checkpoint:
            self.save_checkpoint(request, effect.slot, len(effect.tokens))

        def there() -> bool:
            return self.find_slot(effect.slot, request) is state

        return SlotSnapshot(effect.slot, there, state.salt, state.draft_rows, record_marks(self.lane.devices))

    def save_checkpoint(self, request: RequestId, slot: SlotId, at: int) -> bool:
        """Keep the slot's positional state if it stands behind rows `[0, at)`.

        Return False if it does not or cannot be kept.
        """
        state, layout = self.find_slot(slot, request), self.store.layout
        if isinstance(state, DeviceFailed) or not layout.state:
            return False
        if self.state.locate_state(state.valid) != at or at % layout.block_size or not at:
            where = request, slot, state.valid, at
            log.warning("request %d: slot %d has %d rows, but no checkpoint at %d", *where, extra={"request": request})
            return False
        tokens = tuple(state.tokens[:at])
        if not self.store.lacks_checkpoint(tokens, state.salt):
            return True
        try:
            buffer = self.store.memory.allocate(layout.compute_size("state", 0))
            self.state.copy_out(slot, buffer.data)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            about = {"request": request}
            log.warning("request %d: no memory for the checkpoint at %d: %s", request, at, error, extra=about)
            return False
        return self.store.keep_checkpoint(tokens, buffer, state.salt)

    # --- called on a thread of its own ---

    def _copy_missing_runs(self, effect: SaveSnapshot, found: SlotSnapshot) -> tuple[int, int]:
        """Copy runs until all are kept or the time is over. Return (rows kept from the first one on, new bytes)."""
        end, tokens, saved = self.clock_ns() + MAX_SNAPSHOT_NS, effect.tokens, 0
        delay = SnapshotDelay()
        for run, movers in self._find_missing_runs(effect, found):
            self._wait_for_first_tokens(delay)
            late = saved > 0 and self.clock_ns() > end
            size = None if late else self._copy_run(found, run, movers, end)
            if size is None:
                why = "no time" if late else "no room"
                log.info("slot %d: %s for %s %d..%d", effect.slot, why, run.kind, run.start, len(tokens) - 1)
                self.store.dropped_rows += len(tokens) - run.start
                return (run.start if run.kind == "rows" else len(tokens)), saved
            saved += size
        return len(tokens), saved

    def _wait_for_first_tokens(self, delay: SnapshotDelay) -> None:
        """Wait while first tokens are pending.

        Copies take memory bandwidth from them, and their Python the interpreter.
        """
        while delay.polls_left and not self.is_slot_requested():
            delay.quiet_polls = 0 if self.is_first_token_pending() else delay.quiet_polls + 1
            if delay.quiet_polls > QUIET_POLLS:
                return
            delay.polls_left -= 1
            time.sleep(POLL_S)

    def _find_missing_runs(self, effect: SaveSnapshot, found: SlotSnapshot) -> Iterator[tuple[Run, Sequence[RowMover]]]:
        for run in self.store.find_missing_runs(effect.tokens, salt=found.salt):
            yield run, self.target
        if self.draft:
            start, stop = found.draft_span
            for run in self.store.find_missing_runs(effect.tokens[:stop], "draft", start, found.salt):
                yield run, self.draft

    def _copy_run(self, found: SlotSnapshot, run: Run, movers: Sequence[RowMover], end: int) -> int | None:
        """Copy one run and give it to the store. Return its bytes, or None if there was no room."""
        try:
            buffer = self._allocate(self.store.layout.compute_size(run.kind, run.length), end)
            for mover in movers:
                work = partial(mover.copy_out, found.slot, (run.start, run.stop), buffer.data, found.marks)
                work() if mover.is_addressable else self._run_on_lane(work, found)
        except Exception as error:
            gone = run.kind == "draft" and isinstance(error, RowsLost)  # a lost draft costs its own rows only
            if not (gone or is_out_of_memory(error)):
                raise
            return None
        return buffer.data.nbytes if self.store.keep_run(run, buffer) else None

    def _allocate(self, size: int, end: int) -> Buffer:
        """Return a buffer, of pinned memory where there is a GPU. Raises MemoryError.

        More memory is pinned if need be, unless both another snapshot and a request for a slot wait. Where no other
        snapshot waits, it waits until lower tiers have written some of what is in pinned memory.
        """
        before = True  # what has just been written is given back a moment later
        while True:
            writing, alone = (
                self.store.queued_bytes > 0,
                self._pending_snapshots <= 1,
            )
            try:
                return self.store.memory.allocate(size, held=True, more=alone or not self.is_slot_requested())
            except MemoryError:
                if not alone or not (writing or before) or self.clock_ns() > end:
                    raise
            before = writing
            time.sleep(PAUSE_S)

    def _run_on_lane(self, work: Callable[[], T], found: SlotSnapshot) -> T:
        """Run the copy on the lane, between its other work.

        Raises RowsLost if the slot no longer has the rows: a process that was lost and restarted has other rows under
        the same slot number.
        """

        def taken() -> T:
            if not found.is_current():
                raise RowsLost((), f"slot {found.slot} has lost the rows that were to be kept")
            return work()

        done = Future[T]()
        self.lane.post(lambda: done.set_result(taken()), done.set_exception)
        return done.result()
