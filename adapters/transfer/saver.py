"""Copies rows of a slot out into the store when a request is over, without holding up the device lane.

The problem: what a slot holds must be copied to host memory before the slot is opened for another request. The copy
takes as long as some decode steps, the lane computes for other requests meanwhile, and first tokens must not wait.

How a snapshot is taken (`Saver.save`):

1. On the lane (`_prepare`): check that the slot holds the rows, and let the draft catch up. If a checkpoint was asked
   for, copy the positional state on its device; another thread brings the copy to host memory (`save_checkpoint`).
   Record a CUDA event behind everything that each GPU has been given.
2. On the saver's own thread (`_copy_missing_runs`): ask the store which runs no tier has, and copy one run after the
   other into memory of the store. Copies on a GPU wait for the events. A part that cannot be addressed from here (a
   shard in another process) is copied on the lane, one run at a time.
3. Each run is given to the store, which queues it for the lower tiers.

Invariants: until the snapshot is answered, its slot belongs to the request and no row of it changes, so another thread
may read them. Rows are kept from the first one on without a gap: when time or memory ends, the rest is dropped and
counted (`Store.dropped_rows`). The target's runs come first, so a draft's run that is dropped costs no row of the
target; it is counted apart (`Store.dropped_draft_rows`). A snapshot has MAX_SNAPSHOT_NS from its turn on the saver's
thread on, including the time in which it waits for its gate. One run is copied in any case. There is one saver thread,
so snapshots are taken one after the other.

When the next run may be copied, and whether more memory may be pinned or waited for, is decided in the core
(`states/pacing.py`). It sends `PaceSnapshot` to the one snapshot that is being taken; `pace_snapshot` puts it into
the `PaceGate` of that snapshot, at which the thread waits between two runs. A gate is closed at first. Once the engine
no longer waits for the snapshot, the gate stays open (`UNPACED`), so that the thread always ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal, TypeAlias, TypeVar

from attrs import define, field, frozen

from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.models.decoder.shard import NamedTensors
from adapters.store.files.file_format import Run
from adapters.store.slab_memory import EAGER_BYTES, Buffer
from adapters.store.store import Store
from adapters.store.tier import ReadableTier
from adapters.transfer.copy_rows import CudaEvents, RowMover, StateMover, record_cuda_events
from adapters.transfer.fence import SlotFinder
from effects.ids import DeviceFailed, RequestId, SlotId, Span, StoreFailed, Tokens
from effects.pacing import PaceSnapshot
from effects.ports import RowsLost
from effects.snapshot import SaveSnapshot, SnapshotSaved

T = TypeVar("T")
log = logging.getLogger("rekindle.store")

# For one snapshot. 32k tokens of an 8B model take a tenth of it, and the slot waits as long.
MAX_SNAPSHOT_NS = 2_000_000_000
# Copies of states that a device holds at once, each until it is in host memory. A state of 147 MiB takes 3 ms to pinned
# memory, and a prefill that leaves one takes far longer. Several requests may end at once, and each leaves a state.
MOST_COPIES = 4
# The pace of a snapshot that the engine no longer waits for: it may copy at once, pin memory, and wait for memory until
# its time (MAX_SNAPSHOT_NS) is over.
UNPACED = PaceSnapshot(may_copy=True)

# Why a run was dropped: the snapshot's time was over, the store had no memory or no budget for it, or a draft in
# another process no longer has these rows.
DropReason: TypeAlias = Literal["no time", "no memory", "the draft has lost its rows"]


@frozen
class SnapshotSource:
    """The source of a snapshot: a slot as it was when the lane looked.

    is_current: does the slot still have those rows? Called on the lane. salt: rows that are kept are found with the
    same salt only. draft_span: the rows that the draft has its own for.
    """

    slot: SlotId
    is_current: Callable[[], bool]
    salt: str
    draft_span: Span
    cuda_events: CudaEvents


@define(eq=False)
class PaceGate:
    """The pace of one snapshot. The event loop sets it. Between two runs the saver's thread waits until it may copy.

    changed: gets an item when the thread should look again, because the pace has changed or memory has come free.
    """

    pace: PaceSnapshot = field(factory=PaceSnapshot)
    waited_ns: int = 0  # for host memory
    changed: SimpleQueue[None] = field(factory=SimpleQueue)

    def set_pace(self, pace: PaceSnapshot) -> None:
        """Change the pace, and wake the saver's thread. Called on the event loop."""
        self.pace = pace
        self.changed.put(None)

    def wait_until_open(self) -> None:
        """Wait until the next run may be copied."""
        while not self.pace.may_copy:
            self.changed.get()

    def compute_memory_wait(self, left_ns: int) -> int:
        """Return how long the snapshot may still wait for host memory. left_ns: to the end of all snapshots' limit."""
        most_ns = self.pace.memory_wait_ns
        return left_ns if most_ns is None else min(left_ns, most_ns - self.waited_ns)


@define(eq=False)
class Saver:
    """Takes snapshots.

    catch_up: lets a draft compute its rows for those of a slot, before they are kept. Called on the lane.
    """

    store: Store[ReadableTier]
    lane: DeviceLane
    find_slot: SlotFinder
    target: Sequence[RowMover]
    draft: Sequence[RowMover]
    state: StateMover
    catch_up: Callable[[int], object] = lambda _: None
    clock_ns: Callable[[], int] = time.monotonic_ns
    worker: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "store-save"))
    state_worker: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "store-state"))
    _gates: dict[RequestId, PaceGate] = field(init=False, factory=dict[RequestId, PaceGate])
    _copy_permits: threading.Semaphore = field(init=False, factory=lambda: threading.Semaphore(MOST_COPIES))
    _keys_in_flight: set[tuple[Tokens, str]] = field(init=False, factory=set)  # checkpoints on their way to host memory

    # --- called on the event loop ---

    def save(self, request: RequestId, effect: SaveSnapshot) -> Awaitable[SnapshotSaved | StoreFailed]:
        """Begin to copy out the rows that no tier has. Lower tiers write these later, in the background.

        The gate is there when this returns, so that no `PaceSnapshot` comes too early for it.
        """
        self._gates[request] = PaceGate()
        return self._save(request, effect, self._gates[request])

    def pace_snapshot(self, request: RequestId, pace: PaceSnapshot) -> None:
        """Change what the request's snapshot may do. Nothing happens if it has ended meanwhile."""
        if (gate := self._gates.get(request)) is not None:
            gate.set_pace(pace)

    async def _save(self, request: RequestId, effect: SaveSnapshot, gate: PaceGate) -> SnapshotSaved | StoreFailed:
        try:
            source = await self.lane.run(partial(self._prepare, request, effect))
            if isinstance(source, StoreFailed):
                return source
            copying = partial(self._copy_missing_runs, effect, source, gate)
            loop = asyncio.get_running_loop()
            rows, saved_bytes = await loop.run_in_executor(self.worker, copying)
            # Checkpoints are kept in order, so an empty job at the end of their queue waits for those of this request.
            await loop.run_in_executor(self.state_worker, lambda: None)
        finally:
            del self._gates[request]
            gate.set_pace(UNPACED)  # if this was cancelled, the thread must not wait for an engine that has gone
        log.info(
            "request %d: kept %d tokens, wrote %d new bytes", request, rows, saved_bytes, extra={"request": request}
        )
        return SnapshotSaved(rows, saved_bytes)

    def close(self) -> None:
        """Wait for the snapshots and checkpoints that are being taken."""
        self.worker.shutdown()
        self.state_worker.shutdown()

    # --- called on the lane ---

    def _prepare(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSource | StoreFailed:
        self.catch_up(effect.slot)
        state = self.find_slot(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        if not state.holds(effect.tokens):
            return StoreFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        if effect.checkpoint:
            self.save_checkpoint(request, effect.slot, len(effect.tokens))

        def is_current() -> bool:
            return self.find_slot(effect.slot, request) is state

        return SnapshotSource(
            effect.slot, is_current, state.salt, state.draft_rows, record_cuda_events(self.lane.devices)
        )

    def save_checkpoint(self, request: RequestId, slot: SlotId, at: int) -> bool:
        """Begin to keep the slot's positional state if it is the state after rows `[0, at)`.

        The state is copied on its device; a thread brings the copy to host memory. Return True also if the state is
        kept already. Return False if the slot has no such state, or if its device has no memory for the copy. A device
        with pinned memory does not wait for earlier copies either: other requests would wait for their next tokens,
        and the state is on the device in any case.
        """
        state = self.find_slot(slot, request)
        layout = self.store.layout
        if isinstance(state, DeviceFailed) or not layout.state:
            return False
        if self.state.locate_state(state.valid) != at or at % layout.block_size or not at:
            where = request, slot, state.valid, at
            log.warning("request %d: slot %d has %d rows, but no checkpoint at %d", *where, extra={"request": request})
            return False
        key = tuple(state.tokens[:at]), state.salt
        if key in self._keys_in_flight or not self.store.lacks_checkpoint(*key):
            return True
        if not self._copy_permits.acquire(blocking=not self.store.memory.pin):
            self._note_dropped_checkpoint(request, at, f"{MOST_COPIES} earlier ones are on their way")
            return False
        try:
            exported = self.state.export(slot)
            cuda_events = record_cuda_events(self.lane.devices)
        except Exception as error:
            self._copy_permits.release()
            if not is_out_of_memory(error):
                raise
            self._warn_of_lost_checkpoint(request, at, error)
            return False
        self._keys_in_flight.add(key)
        self.state_worker.submit(self._keep_checkpoint, request, key, exported, cuda_events)
        return True

    def _warn_of_lost_checkpoint(self, request: RequestId, at: int, error: Exception) -> None:
        log.warning("request %d: the checkpoint at %d is lost: %s", request, at, error, extra={"request": request})

    def _note_dropped_checkpoint(self, request: RequestId, at: int, why: str) -> None:
        log.info("request %d: the checkpoint at %d stays on the device: %s", request, at, why)

    # --- called on the thread of checkpoints ---

    def _keep_checkpoint(
        self, request: RequestId, key: tuple[Tokens, str], exported: NamedTensors, cuda_events: CudaEvents
    ) -> None:
        """Bring a copy of a state to host memory and give it to the store. A failure costs the checkpoint only.

        Where memory is pinned, the state needs some that is free. To pin more would block all calls of CUDA, and a copy
        to other memory takes 30 times as long. Both would hold up the steps of other requests.
        """
        tokens, salt = key
        memory = self.store.memory
        size = self.store.layout.compute_size("state", 0)
        try:
            buffer = memory.allocate(size, pinned_only=True, may_grow=memory.slab_bytes < EAGER_BYTES)
            self.state.write(exported, buffer.data, cuda_events)
            self.store.keep_checkpoint(tokens, buffer, salt)
        except MemoryError as error:
            self._note_dropped_checkpoint(request, len(tokens), str(error))
        except Exception as error:  # noqa: BLE001 - without it, rows are computed again
            self._warn_of_lost_checkpoint(request, len(tokens), error)
        finally:
            self._keys_in_flight.discard(key)
            self._copy_permits.release()

    # --- called on the saver's thread ---

    def _copy_missing_runs(self, effect: SaveSnapshot, source: SnapshotSource, gate: PaceGate) -> tuple[int, int]:
        """Copy runs, those of the target first, until all are kept or one is dropped.

        Return the tokens from the first one on whose rows of the target are kept, and the new bytes.
        """
        end = self.clock_ns() + MAX_SNAPSHOT_NS
        tokens = effect.tokens
        saved_bytes = 0
        for run, movers in self._find_missing_runs(effect, source):
            gate.wait_until_open()
            is_late = saved_bytes > 0 and self.clock_ns() > end
            copied = "no time" if is_late else self._copy_run(source, run, movers, gate, end)
            if isinstance(copied, str):
                return self._drop_rest(effect, source, run, copied), saved_bytes
            saved_bytes += copied
        return len(tokens), saved_bytes

    def _drop_rest(self, effect: SaveSnapshot, source: SnapshotSource, run: Run, why: DropReason) -> int:
        """Log and count the rows from this run on, which are not kept. Return the tokens whose target rows are kept."""
        is_draft = run.kind == "draft"
        stop = min(source.draft_span[1], len(effect.tokens)) if is_draft else len(effect.tokens)
        whose = "the draft" if is_draft else "the target"
        log.info("slot %d: rows %d..%d of %s are not kept: %s", effect.slot, run.start, stop - 1, whose, why)
        if is_draft:
            self.store.dropped_draft_rows += stop - run.start
            return len(effect.tokens)
        self.store.dropped_rows += stop - run.start
        return run.start

    def _find_missing_runs(
        self, effect: SaveSnapshot, source: SnapshotSource
    ) -> Iterator[tuple[Run, Sequence[RowMover]]]:
        for run in self.store.find_missing_runs(effect.tokens, salt=source.salt):
            yield run, self.target
        if self.draft:
            start, stop = source.draft_span
            for run in self.store.find_missing_runs(effect.tokens[:stop], "draft", start, source.salt):
                yield run, self.draft

    def _copy_run(
        self, source: SnapshotSource, run: Run, movers: Sequence[RowMover], gate: PaceGate, end: int
    ) -> int | DropReason:
        """Copy one run and give it to the store. Return its bytes, or why it was dropped.

        Raises RowsLost if the target has lost the rows, and whatever a copy raises except errors of memory.
        """
        try:
            buffer = self._allocate(self.store.layout.compute_size(run.kind, run.length), gate, end)
            for mover in movers:
                work = partial(mover.copy_out, source.slot, (run.start, run.stop), buffer.data, source.cuda_events)
                work() if mover.is_addressable else self._run_on_lane(work, source)
        except Exception as error:
            if run.kind == "draft" and isinstance(error, RowsLost):
                return "the draft has lost its rows"
            if not is_out_of_memory(error):
                raise
            return "no memory"
        return buffer.data.nbytes if self.store.keep_run(run, buffer) else "no memory"

    def _allocate(self, size: int, gate: PaceGate, end: int) -> Buffer:
        """Return a buffer, of pinned memory where there is a GPU. Raises MemoryError.

        Where the pace allows it, the thread waits until lower tiers have written some of what is in pinned memory.
        end: the time of `clock_ns` up to which it may wait.
        """
        memory = self.store.memory
        with memory.notify(gate.changed):
            while True:
                is_writing = self.store.queued_bytes > 0  # asked before, since memory is free when a write is over
                try:
                    return memory.allocate(size, pinned_only=True, may_grow=gate.pace.may_grow)
                except MemoryError:
                    began = self.clock_ns()
                    wait_ns = gate.compute_memory_wait(end - began)
                    if wait_ns <= 0 or not is_writing:
                        raise
                with suppress(Empty):
                    gate.changed.get(timeout=wait_ns / 1e9)
                gate.waited_ns += self.clock_ns() - began

    def _run_on_lane(self, work: Callable[[], T], source: SnapshotSource) -> T:
        """Run the copy on the lane, between its other work, and wait until it is done.

        Raises RowsLost if the slot no longer has the rows: a process that was lost and restarted has other rows under
        the same slot number.
        """

        def check_and_work() -> T:
            if not source.is_current():
                raise RowsLost((), f"slot {source.slot} has lost the rows that were to be kept")
            return work()

        done = Future[T]()
        self.lane.post(lambda: done.set_result(check_and_work()), done.set_exception)
        return done.result()
