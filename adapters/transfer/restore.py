"""Brings rows back into slots beside the lane, and says on the lane when they are there.

A restore does not occupy the lane: while it is in flight, its slot is the request's alone and nobody reads rows that
have not been acknowledged, so threads of its own may write them. Only what the slot is known to hold is changed on the
lane, when all of them are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import anyio
from attrs import define, field

from adapters.device.lane import DeviceLane
from adapters.device.slots import SlotState
from adapters.store.disk import Disk
from adapters.store.format import Kind
from adapters.store.lease import Lease, Part
from adapters.store.memory import Buffer
from adapters.store.seekable import Damaged
from adapters.store.store import AHEAD, Store
from adapters.transfer.copy import Mover, StateMover
from adapters.transfer.fence import Fence, Fences
from effects.ids import DeviceFailed, RequestId, SlotId, Span, StoreFailed
from effects.ports import RowsLost
from effects.prefill import OpenSlot
from effects.restore import BlocksRestored, RestoreBlocks

T = TypeVar("T")
log = logging.getLogger("rekindle.store")

GIVEN_UP = StoreFailed("abandoned", "the request was abandoned")
WORKERS = 2 * AHEAD  # threads that open, read and copy runs: two restores in full, more of them take turns


@define(eq=False)
class Move:
    """One entry's part on its way into the slot. left: who has not put it there yet, each in its part of the target.

    buffer: of a checkpoint, which is put there at the very end.
    """

    part: Part
    span: Span
    left: list[Mover]
    failure: StoreFailed | None = None
    buffer: Buffer | None = None

    @property
    def kind(self) -> Kind:
        return self.part.entry.kind

    def put(self, mover: Mover, slot: SlotId, buffer: Buffer, fence: Fence) -> None:
        try:
            mover.put(slot, self.span, buffer.data, self.part.entry.start, fence.after)
            self.left.remove(mover)
        except (ValueError, RuntimeError, RowsLost) as error:  # a device that finds no memory is a RuntimeError
            self.failure = StoreFailed("broken", str(error))


@define(eq=False)
class Restore:
    """One restore, how far it has come, and why it ended before its time."""

    effect: RestoreBlocks
    fence: Fence
    moves: tuple[Move, ...]
    abandoned: bool = False
    failure: StoreFailed | None = None

    def ready(self) -> list[Move]:
        """What is there, as far as it is of use: the target's rows from the front on, and the draft's."""
        rows = [move for move in self.moves if move.kind == "rows"]
        gap = next((at for at, move in enumerate(rows) if move.left), len(rows))
        self.failure = self.failure or (rows[gap].failure if gap < len(rows) else None)
        return rows[:gap] + [move for move in self.moves if move.kind == "draft" and not move.left]


@define(eq=False)
class Restorer:
    """Called on the event loop. draft: where there is one, its rows are restored with the target's."""

    store: Store[Disk]
    lane: DeviceLane
    fences: Fences
    target: Sequence[Mover]
    draft: Sequence[Mover]
    state: StateMover
    workers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(WORKERS, "store-restore"))
    _restoring: dict[RequestId, Restore] = field(factory=dict[RequestId, Restore])

    def opened(self, request: RequestId, effect: OpenSlot) -> None:
        """The slot was just opened for the request."""
        self.fences.opened(request, effect)

    def abandon(self, request: RequestId) -> None:
        """A restore in flight stops after the runs that it is at."""
        if (restore := self._restoring.get(request)) is not None:
            restore.abandoned = True

    async def restore(self, request: RequestId, effect: RestoreBlocks) -> BlocksRestored | StoreFailed:
        """What really came, without a gap from `start` on. The lease is released whatever happens."""
        lease, started = self.store.lease(effect.lease), time.perf_counter_ns()
        if lease.states and effect.stop not in lease.checkpoints:
            self.store.release(effect.lease)
            return StoreFailed("broken", f"there are checkpoints at {lease.checkpoints}, not at {effect.stop}")
        by_kind: Mapping[Kind, Sequence[Mover]] = {"rows": self.target, "draft": self.draft, "state": ()}
        now = Restore(effect, self.fences.of(request, effect.slot), tuple(moves(lease, effect, by_kind)))
        self._restoring[request] = now
        try:
            return await self._restore(request, lease, now, started)
        finally:
            del self._restoring[request]
            self.store.release(effect.lease)

    async def _restore(
        self, request: RequestId, lease: Lease, now: Restore, started: int
    ) -> BlocksRestored | StoreFailed:
        effect = now.effect
        queue = deque(now.moves)
        async with anyio.create_task_group() as tasks:
            for _ in range(min(AHEAD, len(queue))):
                tasks.start_soon(self._work, now, queue)
        taken, ready = time.perf_counter_ns() - started, now.ready()
        if now.failure is not None and lease.states:
            return now.failure  # rows alone do not continue a sequence that has a state beside them
        failure = await self.lane.run(partial(self._landed, request, now, ready))
        stop = max((move.span[1] for move in ready if move.kind == "rows"), default=effect.start)
        if failure is not None or (stop == effect.start and not lease.states):
            return failure or now.failure or GIVEN_UP
        loaded = sum(map(self._bytes, ready)) + sum(self._bytes(move) for move in now.moves if move.kind == "state")
        self.store.restored(lease.place, loaded, taken / 1e9)
        log.info(
            "request %d: %d tokens, %d bytes restored from %s in %.1f ms%s",
            *(request, stop - effect.start, loaded, lease.place, taken / 1e6),
            f"; then {now.failure.detail}" if now.failure else "",
            extra={"request": request},
        )
        return BlocksRestored(effect.start, stop, loaded, taken)

    async def _work(self, now: Restore, queue: deque[Move]) -> None:
        """One of a few that take a restore's parts, in order, while they are of use. What threads do is waited for."""
        with anyio.CancelScope(shield=True):
            while queue and now.failure is None:
                if now.abandoned:
                    now.failure = GIVEN_UP
                    return
                move = queue.popleft()
                await self._carry(now, move)
                if move.failure is not None and move.kind == "rows":
                    now.failure = now.failure or move.failure

    async def _carry(self, now: Restore, move: Move) -> None:
        """Into memory, and on into the slot; a checkpoint waits for the rows."""
        try:
            buffer = await self._read(move.part, partial(self._at_once, now, move))
        except Damaged as error:
            move.failure = StoreFailed("broken", str(error))
        except OSError as error:
            move.failure = StoreFailed("io", error.strerror or str(error))
        except MemoryError:
            move.failure = StoreFailed("out_of_memory", "no memory to read into")
        else:
            move.failure = move.failure or await now.fence.wait()
            move.buffer = buffer if move.kind == "state" else None
            far = [mover for mover in move.left if not mover.anywhere]
            if move.failure is None:
                async with anyio.create_task_group() as parts:  # side by side: each is on a device of its own
                    if far:
                        parts.start_soon(self.lane.run, partial(self._side_by_side, now, move, far, buffer))
                    for mover in [mover for mover in move.left if mover.anywhere]:
                        put = partial(move.put, mover, now.effect.slot, buffer, now.fence)
                        parts.start_soon(self._beside, put)
        if move.kind != "rows" and move.failure is not None:
            log.warning("what goes with a target's rows is missing (%s): %s", move.kind, move.failure.detail)

    async def _read(self, part: Part, then: Callable[[Buffer], object]) -> Buffer:
        """The whole entry's tensors, end to end. `then` is called by the thread that reads them, if one has to."""
        disk = self.store.disk
        if part.place == "host" or disk is None:
            return self.store.host.rows[part.entry.handle]
        return await disk.read(part.entry, self.store.memory, self.workers, then)

    def _side_by_side(self, now: Restore, move: Move, far: Sequence[Mover], buffer: Buffer) -> None:
        """On the lane, for shards that are asked by name: all at once, each on a thread, while the lane waits for them.
        So it takes as long as the slowest, and what one of them loses is known before the lane does anything else.
        """
        first, *others = far
        asked = [self.workers.submit(move.put, mover, now.effect.slot, buffer, now.fence) for mover in others]
        move.put(first, now.effect.slot, buffer, now.fence)
        for one in asked:
            one.result()

    async def _beside(self, work: Callable[[], T]) -> T:
        """On one of our threads. Nothing that a request waits for is done on those that the whole process shares."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)

    def _at_once(self, now: Restore, move: Move, buffer: Buffer) -> None:
        """On the thread that has read it: another one would have to be woken for the same."""
        self.store.promote(move.part.entry, buffer)
        for mover in tuple(move.left):
            if mover.anywhere and now.fence.passed and move.failure is None:
                move.put(mover, now.effect.slot, buffer, now.fence)

    def _landed(self, request: RequestId, now: Restore, ready: list[Move]) -> StoreFailed | None:
        """On the lane: from now on the slot holds what has come."""
        state = self.fences.serving(now.effect.slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        checkpoints = [move for move in now.moves if move.kind == "state"]
        for move in checkpoints:
            if (failure := self._put_state(state, now, move)) is not None:
                return failure
            state.resume(now.effect.stop)
        for move in ready:
            if move.kind == "rows" and not checkpoints:
                state.load(*move.span)
            elif move.kind == "draft":
                state.draft(*move.span)
        return None

    def _put_state(self, state: SlotState, now: Restore, move: Move) -> StoreFailed | None:
        """Before the rows count, which are of no use without it."""
        slot, start, rows = now.effect.slot, now.effect.start, state.valid + state.ahead
        if move.buffer is None:
            return move.failure or GIVEN_UP
        if rows < start:
            return StoreFailed("broken", f"slot {slot} has {rows} rows; a state goes with those from {start} on")
        try:
            self.state.put(slot, move.buffer.data)
        except (ValueError, RuntimeError, RowsLost) as error:
            state.valid, state.ahead = 0, rows  # a part of it may be there: nothing goes on from what was
            return StoreFailed("lost", str(error))
        return None

    def _bytes(self, move: Move) -> int:
        return self.store.layout.size(move.kind, move.span[1] - move.span[0])


def moves(lease: Lease, effect: RestoreBlocks, movers: Mapping[Kind, Sequence[Mover]]) -> Iterator[Move]:
    """What there is of the rows that are wanted and that somebody here has a place for, and the checkpoint."""
    for part in (*lease.parts, *lease.draft):
        start, stop = max(part.start, effect.start), min(part.stop, effect.stop)
        if start < stop and movers[part.entry.kind]:
            yield Move(part, (start, stop), list(movers[part.entry.kind]))
    for part in lease.states:
        if part.stop == effect.stop:
            yield Move(part, (part.start, part.stop), [])
