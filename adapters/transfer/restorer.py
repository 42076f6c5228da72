"""Brings rows back into slots beside the lane, and says on the lane when they are there.

A restore does not occupy the lane: while it is in flight, its slot is the request's alone and nobody reads rows that
have not been acknowledged, so threads of its own may write them. Only what the slot is known to hold is changed on the
lane, when all of them are there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import anyio
from attrs import define, field

from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.store.disk_tier import Disk
from adapters.store.files.file_format import Kind
from adapters.store.files.seekable import Damaged
from adapters.store.lease import Lease, Part
from adapters.store.slab_memory import Buffer
from adapters.store.store import AHEAD, Store
from adapters.transfer.copy_rows import Mover, Run, StateMover
from adapters.transfer.fence import Fence, Fences
from effects.ids import DeviceFailed, RequestId, Span, StoreFailed
from effects.ports import RowsLost
from effects.prefill import OpenSlot
from effects.restore import BlocksRestored, RestoreBlocks

log = logging.getLogger("rekindle.store")

GIVEN_UP = StoreFailed("abandoned", "the request was abandoned")
PIECE = 32 << 20  # bytes of rows that the lane puts, or has others put, at once: a few milliseconds
# Threads that put rows of one restore into slots, of each GPU: each has a core to copy.
ABREAST = min(AHEAD, os.cpu_count() or 1)
Pairs: TypeAlias = "deque[tuple[Mover, Move]]"
Futures: TypeAlias = list[Future[None]]
WORKERS = 2 * AHEAD  # threads that open, read and copy runs: two restores in full, more of them take turns


@define(eq=False)
class Move:
    """One entry's part on its way into the slot. left: who has not put it there yet, each in its part of the target,
    or been told to.

    buffer: while it is in memory; of a checkpoint, which is put there at the very end, until then.
    """

    part: Part
    span: Span
    left: list[Mover]
    buffer: Buffer | None = None
    failure: StoreFailed | None = None

    @property
    def kind(self) -> Kind:
        return self.part.entry.kind

    @property
    def run(self) -> Run:
        assert self.buffer is not None
        return self.span, self.buffer.data, self.part.entry.start


@define(eq=False)
class Restore:
    """One restore, how far it has come, and why it ended before its time. Threads change it."""

    effect: RestoreBlocks
    fence: Fence
    moves: tuple[Move, ...]
    abandoned: bool = False
    failure: StoreFailed | None = None

    @property
    def over(self) -> bool:
        """Is what is not there yet of no use any more?"""
        return self.abandoned or self.failure is not None

    def put(self, mover: Mover, move: Move) -> None:
        """Into one part of the target, or of the draft."""
        if self._went(partial(mover.put, self.effect.slot, *move.run, self.fence.after), [move]):
            move.left.remove(mover)

    def tell(self, mover: Mover, moves: Sequence[Move]) -> None:
        """The same, of one that is asked by name, as far as it has not been told; on the lane. Nobody waits: whatever
        is asked of it later comes behind this, and learns if this has failed.
        """
        coming = [move for move in moves if mover in move.left]
        if coming and not self.over:
            runs, keep = [move.run for move in coming], [move.buffer for move in coming]
            if self._went(partial(mover.tell, self.effect.slot, runs, keep), coming):
                for move in coming:
                    move.left.remove(mover)

    def _went(self, work: Callable[[], object], moves: Sequence[Move]) -> bool:
        try:
            work()
        except (ValueError, RuntimeError, RowsLost) as error:  # a device that finds no memory is a RuntimeError
            self.failed(moves, StoreFailed("broken", str(error)))
            return False
        return True

    def put_each(self, moves: Pairs) -> None:
        """The next one, as long as there are some; others may do the same."""
        while moves and not self.over:
            with suppress(IndexError):
                self.put(*moves.popleft())

    def failed(self, moves: Sequence[Move], why: StoreFailed) -> None:
        for move in moves:
            move.failure = move.failure or why
            if move.kind == "rows":
                self.failure = self.failure or why
            else:
                log.warning("what goes with a target's rows is missing (%s): %s", move.kind, why.detail)

    def ready(self) -> list[Move]:
        """What is there, as far as it is of use: the target's rows from the front on, and the draft's."""
        rows = [move for move in self.moves if move.kind == "rows"]
        gap = next((at for at, move in enumerate(rows) if move.left), len(rows))
        if gap < len(rows):
            self.failure = self.failure or GIVEN_UP
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
        held, queue = list[Move](), deque[Move]()
        for move in now.moves:
            (queue if self._is_read(move) else held).append(move)
        with anyio.CancelScope(shield=True):  # what threads do is waited for
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._bring_held, now, held)
                for _ in range(min(AHEAD, len(queue))):
                    tasks.start_soon(self._bring_read, now, queue)
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

    def _is_read(self, move: Move) -> bool:
        return move.part.place != "host" and self.store.disk is not None

    async def _bring_held(self, now: Restore, moves: Sequence[Move]) -> None:
        """What is in memory as it is."""
        for move in moves:
            move.buffer = self.store.host.rows[move.part.entry.handle]
        await self._bring(now, moves)

    async def _bring_read(self, now: Restore, queue: deque[Move]) -> None:
        """One of a few that take what has to be read, in order, while that is of use."""
        disk = self.store.disk
        assert disk is not None
        while queue and not now.over:
            move = queue.popleft()
            at_once = partial(self._at_once, now, move)
            try:
                move.buffer = await disk.read(move.part.entry, self.store.memory, self.workers, at_once)
            except Damaged as error:
                now.failed([move], StoreFailed("broken", str(error)))
            except OSError as error:
                now.failed([move], StoreFailed("io", error.strerror or str(error)))
            except MemoryError:
                now.failed([move], StoreFailed("out_of_memory", "no memory to read into"))
            else:
                await self._bring(now, [move])

    def _at_once(self, now: Restore, move: Move, buffer: Buffer) -> None:
        """On the thread that has read it: another one would have to be woken for the same."""
        self.store.promote(move.part.entry, buffer)
        move.buffer = buffer
        if not now.fence.passed:
            return
        left = tuple(move.left)
        for mover in left:
            if not mover.anywhere:  # who cannot be told now is told again by whoever waits for that, and raises there
                self.lane.post(partial(now.tell, mover, [move]), lambda _: None)
        for mover in left:
            if mover.anywhere and move.failure is None:
                now.put(mover, move)

    async def _bring(self, now: Restore, moves: Sequence[Move]) -> None:
        """From memory into the slot, each part of the target beside the others; a checkpoint waits for the rows."""
        coming = deque(move for move in moves if move.left and move.failure is None)
        while coming and not now.over:
            await self._bring_piece(now, self._piece(coming))
        for move in moves:
            if move.kind != "state":
                move.buffer = None

    def _piece(self, coming: deque[Move]) -> list[Move]:
        """The next ones: as many as the lane is at at once, or all of them where it need not."""
        piece = [coming.popleft()]
        asked = any(not mover.anywhere for move in (*piece, *coming) for mover in move.left)
        while coming and (not asked or sum(map(self._bytes, (*piece, coming[0]))) <= PIECE):
            piece.append(coming.popleft())
        return piece

    async def _bring_piece(self, now: Restore, moves: Sequence[Move]) -> None:
        pairs = [(mover, move) for move in moves for mover in tuple(move.left)]
        near = deque(pair for pair in pairs if pair[0].anywhere)
        far = [*dict.fromkeys(mover for mover, _ in pairs if not mover.anywhere)]
        if far:
            beside = await self.lane.run(partial(self._tell, now, far, moves, near))
        else:
            await now.fence.wait()
            beside = self._put_beside(now, near, 0)
        if (failure := now.fence.failure) is not None:
            now.failed(moves, failure)
        for one in beside:
            if not one.done():
                await asyncio.wrap_future(one)
            one.result()

    def _put_beside(self, now: Restore, near: Pairs, asked: int) -> Futures:
        abreast = ABREAST * max(1, len(now.fence.after))
        count = min(max(0, abreast - asked - 1) if asked else abreast, len(near))
        return [self.workers.submit(now.put_each, near) for _ in range(count if now.fence.passed else 0)]

    def _tell(self, now: Restore, far: Sequence[Mover], moves: Sequence[Move], near: Pairs) -> Futures:
        """On the lane, behind the fence. Others are told first, and put theirs while those here are put."""
        if not now.fence.passed:
            return []
        for mover in far:
            now.tell(mover, moves)
        beside = self._put_beside(now, near, len(far))
        now.put_each(near)
        return beside

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
                state.add_loaded_rows(*move.span)
            elif move.kind == "draft":
                state.add_draft_rows(*move.span)
        return None

    def _put_state(self, state: SlotState, now: Restore, move: Move) -> StoreFailed | None:
        """Before the rows count, which are of no use without it."""
        slot, start, rows = now.effect.slot, now.effect.start, state.valid + state.rows_ahead
        if move.buffer is None:
            return move.failure or GIVEN_UP
        if rows < start:
            return StoreFailed("broken", f"slot {slot} has {rows} rows; a state goes with those from {start} on")
        try:
            self.state.put(slot, move.buffer.data)
        except (ValueError, RuntimeError, RowsLost) as error:
            state.valid, state.rows_ahead = 0, rows  # a part of it may be there: nothing goes on from what was
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
