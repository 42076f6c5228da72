"""Copies kept rows back into slots while the device lane works, and tells the lane when a slot holds them.

The problem: to read 100 MiB from a disk and copy them to a GPU takes tens of milliseconds. The lane must compute for
other requests meanwhile, and for the same one: it may compute the front of a prompt while the rest is loaded.

How a restore works (`Restorer.restore`):

1. The lease is cut into *moves* (`plan_moves`), one for each entry and span of rows. A move has a list of movers that
   have not copied it yet: one for each part of the target (or of the draft).
2. Moves whose rows are in host memory are copied at once. The others are read by RUNS_IN_FLIGHT tasks, in order; the
   thread that has read a run also copies it, because its processor cache holds it (`_copy_after_read`).
3. No row may be written until the lane has launched all work of the request that had the slot before: its *fence*
   (`fence.py`). What is read earlier than that waits in memory and is copied afterwards (`_copy_moves`).
4. Parts that are addressable from here are written by COPY_THREADS threads for each GPU. The others are sent their runs
   on the lane, in pieces of PIECE_BYTES, because the lane owns the connection to them.
5. A thread brings the positional state to the device, if there is one (`_stage_states`).
6. On the lane (`_commit`): copy that state into the slot, and only then count the rows as held.

Invariants: the slot belongs to the request while a restore is in flight, and no step reads rows that have not been
acknowledged; so threads may write them. Only the lane changes what the slot is known to hold. The lease is released
whatever happens. A failure leaves the rows before it, from the front on without a gap. A target with positional state
needs all of its rows and the checkpoint, or it gets none.

Example: 0..512 of a prompt are kept, 0..256 in host memory and the rest in two files; 0..64 are computed meanwhile.
There are three moves: 64..256, 256..384 and 384..512. If the last file is damaged, the answer is
`BlocksRestored(64, 384)`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import anyio
import torch
from attrs import define, field

from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.processors import count_processors
from adapters.store.files.file_format import Kind
from adapters.store.lease import Lease
from adapters.store.slab_memory import Buffer
from adapters.store.store import RUNS_IN_FLIGHT, Store
from adapters.store.tier import ReadableTier
from adapters.transfer.copy_rows import RowMover, StateMover
from adapters.transfer.fence import Fences
from adapters.transfer.move_chain import MoveChain, MoveQueue
from adapters.transfer.run_moves import ABANDONED, QueuedCopies, Restore, RunMove, plan_moves
from effects.ids import DeviceFailed, RequestId, StoreFailed
from effects.ports import RowsLost
from effects.prefill import OpenSlot
from effects.restore import BlocksRestored, RestoreBlocks

log = logging.getLogger("rekindle.store")

PIECE_BYTES = 32 << 20  # rows that the lane copies or sends in one go: a few milliseconds
# Threads that copy rows of one restore into slots, for each GPU: more threads than cores would not copy faster.
COPY_THREADS = min(RUNS_IN_FLIGHT, count_processors())
CopyFutures: TypeAlias = list[Future[None]]
WORKERS = 2 * RUNS_IN_FLIGHT  # threads that open, read and copy runs: two restores in full, more of them take turns


@define(eq=False)
class Restorer:
    """Restores what a lease holds. Public methods are called on the event loop. draft: movers of the draft, if any."""

    store: Store[ReadableTier]
    lane: DeviceLane
    fences: Fences
    target: Sequence[RowMover]
    draft: Sequence[RowMover]
    state: StateMover
    workers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(WORKERS, "store-restore"))
    _restoring: dict[RequestId, Restore] = field(factory=dict[RequestId, Restore])

    def place_fence(self, request: RequestId, effect: OpenSlot) -> None:
        """Place a fence after the opening of the slot, so that a restore does not have to wait for later work."""
        self.fences.place_fence(request, effect)

    def abandon(self, request: RequestId) -> None:
        """Stop a restore in flight after the runs that are being copied."""
        if (restore := self._restoring.get(request)) is not None:
            restore.abandoned = True

    async def restore(self, request: RequestId, effect: RestoreBlocks) -> BlocksRestored | StoreFailed:
        """Restore and return what has come, without a gap from `effect.start` on. The lease is released in any case."""
        lease = self.store.get_lease(effect.lease)
        started = time.perf_counter_ns()
        if lease.states and effect.stop not in lease.checkpoints:
            self.store.release(effect.lease)
            return StoreFailed("broken", f"there are checkpoints at {lease.checkpoints}, not at {effect.stop}")
        by_kind: Mapping[Kind, Sequence[RowMover]] = {"rows": self.target, "draft": self.draft, "state": ()}
        restore = Restore(
            effect, self.fences.get_or_place_fence(request, effect.slot), tuple(plan_moves(lease, effect, by_kind))
        )
        self._restoring[request] = restore
        try:
            return await self._restore(request, lease, restore, started)
        finally:
            del self._restoring[request]
            self.store.release(effect.lease)

    async def _restore(
        self, request: RequestId, lease: Lease, restore: Restore, started: int
    ) -> BlocksRestored | StoreFailed:
        effect = restore.effect
        in_memory = list[RunMove]()
        queue = deque[RunMove]()
        for move in restore.moves:
            (queue if self._needs_reading(move) else in_memory).append(move)
        with anyio.CancelScope(shield=True):  # what threads do is waited for
            waiting = MoveQueue(queue, RUNS_IN_FLIGHT, self.store.layout)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._copy_from_memory, restore, in_memory)
                for _ in range(min(RUNS_IN_FLIGHT, len(queue))):
                    tasks.start_soon(self._read_and_copy, restore, waiting)
        taken_ns = time.perf_counter_ns() - started
        ready = restore.collect_ready()
        if restore.failure is not None and lease.states:
            return restore.failure  # rows alone do not continue a sequence that has positional state
        await self._stage_states(restore)
        failure = await self.lane.run(partial(self._commit, request, restore, ready))
        stop = max((move.span[1] for move in ready if move.kind == "rows"), default=effect.start)
        if failure is not None or (stop == effect.start and not lease.states):
            return failure or restore.failure or ABANDONED
        loaded = sum(map(self._count_bytes, ready)) + sum(
            self._count_bytes(move) for move in restore.moves if move.kind == "state"
        )
        self.store.count_restore(lease.tier, loaded, taken_ns / 1e9)
        log.info(
            "request %d: %d tokens, %d bytes restored from %s in %.1f ms%s",
            *(request, stop - effect.start, loaded, lease.tier, taken_ns / 1e6),
            f"; then {restore.failure.detail}" if restore.failure else "",
            extra={"request": request},
        )
        return BlocksRestored(effect.start, stop, loaded, taken_ns)

    def _needs_reading(self, move: RunMove) -> bool:
        """Are its rows in a lower tier, and not in host memory?"""
        return self.store.get_lower_tier(move.part.tier) is not None

    async def _copy_from_memory(self, restore: Restore, moves: Sequence[RunMove]) -> None:
        """Copy what is in host memory."""
        for move in moves:
            move.buffer = self.store.memory_tier.rows[move.part.entry.handle]
        await self._copy_moves(restore, moves)

    async def _read_and_copy(self, restore: Restore, queue: MoveQueue) -> None:
        """Read and copy moves from the queue, as one of several tasks, until it is empty or the restore is over.

        A thread of the tier takes moves from the queue by itself, as long as it can copy all that it has read.
        """
        while (name := queue.get_next_tier()) is not None and not restore.is_over:
            tier = self.store.get_lower_tier(name)
            assert tier is not None, "rows in host memory are not read"
            chain = MoveChain(restore, queue, tier.batch_bytes, name, partial(self._copy_after_read, restore))
            await tier.read(chain.take, self.store.memory, self.workers)
            chain.settle()
            await self._copy_moves(restore, chain.list_uncopied())

    def _copy_after_read(self, restore: Restore, move: RunMove, buffer: Buffer) -> None:
        """Copy a move on the thread that has read it: to wake another one would take longer."""
        self.store.promote(move.part.entry, buffer)
        move.buffer = buffer
        if restore.abandoned or not restore.fence.is_open:
            return
        left = tuple(move.missing_movers)
        for mover in left:
            if not mover.is_addressable:  # what fails here is sent again by `_copy_moves`, and raises there
                self.lane.post(partial(restore.send_runs, mover, [move]), lambda _: None)
        for mover in left:
            if mover.is_addressable and move.failure is None:
                restore.copy_run(mover, move)

    async def _copy_moves(self, restore: Restore, moves: Sequence[RunMove]) -> None:
        """Copy moves from memory into the slot, all parts at the same time.

        A checkpoint keeps its buffer until `_commit`.
        """
        coming = deque(move for move in moves if move.missing_movers and move.failure is None)
        while coming and not restore.is_over:
            await self._copy_piece(restore, self._take_piece(coming))
        for move in moves:
            if move.kind != "state":
                move.buffer = None

    def _take_piece(self, coming: deque[RunMove]) -> list[RunMove]:
        """Take the next moves: PIECE_BYTES of them where the lane has to send some, else all."""
        piece = [coming.popleft()]
        asked = any(not mover.is_addressable for move in (*piece, *coming) for mover in move.missing_movers)
        while coming and (not asked or sum(map(self._count_bytes, (*piece, coming[0]))) <= PIECE_BYTES):
            piece.append(coming.popleft())
        return piece

    async def _copy_piece(self, restore: Restore, moves: Sequence[RunMove]) -> None:
        """Copy these moves into the slot, and return when they are there. Runs on the event loop.

        Parts that cannot be addressed from here get their rows on the lane, and the others are copied by threads
        meanwhile, behind the fence of the slot. A failed fence is recorded as the failure of these moves.
        """
        pairs = [(mover, move) for move in moves for mover in tuple(move.missing_movers)]
        near = deque(pair for pair in pairs if pair[0].is_addressable)
        far = [*dict.fromkeys(mover for mover, _ in pairs if not mover.is_addressable)]
        if far:
            copies = await self.lane.run(partial(self._send_on_lane, restore, far, moves, near))
        else:
            await restore.fence.wait()
            copies = self._start_copies(restore, near, 0)
        if (failure := restore.fence.failure) is not None:
            restore.record_failure(moves, failure)
        for copy in copies:
            if not copy.done():
                await asyncio.wrap_future(copy)
            copy.result()

    def _start_copies(self, restore: Restore, near: QueuedCopies, sender_count: int) -> CopyFutures:
        """Start copies on the workers, COPY_THREADS for each GPU.

        sender_count: parts to which the lane sends meanwhile. Each keeps one thread busy, and the lane copies as well.
        """
        at_once_count = COPY_THREADS * max(1, len(restore.fence.cuda_events))  # one event for each GPU
        count = min(max(0, at_once_count - sender_count - 1) if sender_count else at_once_count, len(near))
        return [self.workers.submit(restore.copy_queued, near) for _ in range(count if restore.fence.is_open else 0)]

    def _send_on_lane(
        self, restore: Restore, far: Sequence[RowMover], moves: Sequence[RunMove], near: QueuedCopies
    ) -> CopyFutures:
        """Send moves to parts elsewhere, then copy those of parts here meanwhile.

        Called on the lane, after the fence.
        """
        if not restore.fence.is_open:
            return []
        for mover in far:
            restore.send_runs(mover, moves)
        copies = self._start_copies(restore, near, len(far))
        restore.copy_queued(near)
        return copies

    async def _stage_states(self, restore: Restore) -> None:
        """Bring checkpoints to the device, so that the lane only copies them there. Without memory it copies more."""
        for move in restore.moves:
            if move.kind == "state" and move.buffer is not None:
                with suppress(torch.OutOfMemoryError):
                    staging = partial(self.state.stage, move.buffer.data)
                    move.staged = await asyncio.get_running_loop().run_in_executor(self.workers, staging)

    def _commit(self, request: RequestId, restore: Restore, ready: list[RunMove]) -> StoreFailed | None:
        """Say that the slot holds what has come, its state first. Called on the lane."""
        state = self.fences.find_slot(restore.effect.slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        checkpoints = [move for move in restore.moves if move.kind == "state"]
        for move in checkpoints:
            if (failure := self._import_state(state, restore, move)) is not None:
                return failure
            state.set_state_row(restore.effect.stop)
        for move in ready:
            if move.kind == "rows" and not checkpoints:
                state.add_loaded_rows(*move.span)
            elif move.kind == "draft":
                state.add_draft_rows(*move.span)
        return None

    def _import_state(self, state: SlotState, restore: Restore, move: RunMove) -> StoreFailed | None:
        """Import the positional state, without which the rows are of no use."""
        slot = restore.effect.slot
        start = restore.effect.start
        rows = state.valid + state.rows_ahead
        if move.buffer is None:
            return move.failure or ABANDONED
        if rows < start:
            return StoreFailed("broken", f"slot {slot} has {rows} rows; a state goes with those from {start} on")
        try:
            staged = self.state.view(move.buffer.data) if move.staged is None else move.staged
            self.state.copy_in(slot, staged, move.part.stop)
        except (ValueError, RuntimeError, RowsLost) as error:
            # Some of the old state may be overwritten, so nothing can go on from it.
            state.valid = 0
            state.rows_ahead = rows
            return StoreFailed("lost", str(error))
        return None

    def _count_bytes(self, move: RunMove) -> int:
        return self.store.layout.compute_size(move.kind, move.span[1] - move.span[0])
