"""Carries store effects out: finds prefixes, brings rows back into slots beside the lane, and takes new rows in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias, TypeVar

import anyio
from anyio import to_thread
from attrs import define, field

from adapters.device.lane import DeviceLane
from adapters.device.slots import SlotState
from adapters.models.shard import NamedTensors, Shard
from adapters.store.format import Kind
from adapters.store.memory import Buffer
from adapters.store.moving import Mover, Slots
from adapters.store.seekable import Damaged
from adapters.store.store import AHEAD, Lease, Miss, Part, Store
from effects.ids import DeviceFailed, RequestId, SlotId, Span, StoreFailed, Tokens
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import OpenSlot
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved

T = TypeVar("T")
log = logging.getLogger("rekindle.store")

GIVEN_UP = StoreFailed("abandoned", "the request was abandoned")
LONG = 8192  # tokens: a longer prompt is looked up beside the event loop
WORKERS = 2 * AHEAD  # threads that open, read and copy runs: two restores in full, more of them take turns
# The state of a slot, if it was opened for this request; asked on the lane.
Serving: TypeAlias = Callable[[int, RequestId], SlotState | DeviceFailed]


@define(eq=False)
class Move:
    """One part on its way into the slot. buffer: of a checkpoint, which is put there at the very end."""

    part: Part
    span: Span
    done: bool = False
    failure: StoreFailed | None = None
    buffer: Buffer | None = None

    @property
    def kind(self) -> Kind:
        return self.part.entry.kind


@define(eq=False)
class Restoring:
    """One restore, how far it has come, and why it ended before its time."""

    effect: RestoreBlocks
    fence: Fence
    moves: tuple[Move, ...]
    abandoned: bool = False
    failure: StoreFailed | None = None

    def ready(self) -> list[Move]:
        """What is there, as far as it is of use: the target's rows from the front on, and the draft's."""
        rows = [move for move in self.moves if move.kind == "rows"]
        gap = next((at for at, move in enumerate(rows) if not move.done), len(rows))
        self.failure = self.failure or (rows[gap].failure if gap < len(rows) else None)
        return rows[:gap] + [move for move in self.moves if move.kind == "draft" and move.done]


@define(eq=False)
class Fence:
    """Behind everything that was asked of a slot before it was opened for this request. On the event loop."""

    request: RequestId
    failure: StoreFailed | None = None
    passed: bool = False  # and nothing failed; any thread may ask
    _decided: anyio.Event = field(factory=anyio.Event)

    async def wait(self) -> StoreFailed | None:
        await self._decided.wait()
        return self.failure

    def open(self, failure: StoreFailed | None, error: BaseException | None) -> None:
        self.failure = failure if error is None else StoreFailed("broken", str(error))
        self.passed = self.failure is None
        self._decided.set()


@define(eq=False)
class StoreExecutor:
    """find, restore, opened, release and abandon are called on the event loop, save and checkpoint on the lane.

    draft: where there is one, its rows are kept and restored with the target's.

    A restore does not occupy the lane: while it is in flight, its slot is the request's alone and nobody reads rows
    that have not been acknowledged, so threads of its own may write them. Only what the slot is known to hold is
    changed on the lane, when all of them are there.
    """

    store: Store
    shard: Shard
    lane: DeviceLane
    serving: Serving
    draft: Slots | None = None
    workers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(WORKERS, "store-restore"))
    _restoring: dict[RequestId, Restoring] = field(factory=dict[RequestId, Restoring])
    _fences: dict[SlotId, Fence] = field(factory=dict[SlotId, Fence])
    _movers: dict[Kind, Mover] = field(init=False)

    def __attrs_post_init__(self) -> None:
        layout = self.store.layout
        self._movers = {"rows": Mover(self.shard, layout.rows)}
        if self.draft is not None and layout.draft is not None:
            self._movers["draft"] = Mover(self.draft, layout.draft.rows)

    async def find(self, request: RequestId, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        if len(effect.prompt) < LONG:
            return self._find(request, effect)
        return await to_thread.run_sync(self._find, request, effect)

    def _find(self, request: RequestId, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        shared = self.store.joins(effect.prompt, effect.window) if effect.window else 0
        found = self.store.find(effect.prompt, effect.beyond)
        if isinstance(found, Miss):
            log.info("request %d: nothing kept beyond %d tokens: %s", request, effect.beyond, found.reason)
            return PrefixMissed(found.reason, shared=shared, length=found.length)
        name, lease = found
        log.info("request %d: %d of %d tokens are kept (%s)", request, lease.length, len(effect.prompt), lease.place)
        return PrefixFound(name, lease.length, lease.place, shared=shared)

    def release(self, _: RequestId, effect: ReleasePrefix) -> None:
        self.store.release(effect.lease)

    def opened(self, request: RequestId, effect: OpenSlot) -> None:
        """Right behind the opening itself: what is asked of the lane next must not keep a restore waiting."""
        self._fences[effect.slot] = self._fence(request, effect.slot)

    def close(self) -> None:
        """When nothing is restored any more: what was kept is written."""
        self.workers.shutdown()
        self.store.close()

    def abandon(self, request: RequestId) -> None:
        """A restore in flight stops after the runs that it is at."""
        if (restoring := self._restoring.get(request)) is not None:
            restoring.abandoned = True

    async def restore(self, request: RequestId, effect: RestoreBlocks) -> BlocksRestored | StoreFailed:
        """What really came, without a gap from `start` on. The lease is released whatever happens."""
        lease, started = self.store.lease(effect.lease), time.perf_counter_ns()
        fence = self._fences.get(effect.slot)
        if fence is None or fence.request != request:
            fence = self._fence(request, effect.slot)
        now = Restoring(effect, fence, tuple(moves(lease, effect)))
        self._restoring[request] = now
        try:
            return await self._restore(request, lease, now, started)
        finally:
            del self._restoring[request]
            self.store.release(effect.lease)

    async def _restore(
        self, request: RequestId, lease: Lease, now: Restoring, started: int
    ) -> BlocksRestored | StoreFailed:
        effect = now.effect
        if lease.state is not None and effect.stop != lease.length:
            return StoreFailed("broken", f"the checkpoint is at {lease.length}, not at {effect.stop}")
        queue = deque(now.moves)
        async with anyio.create_task_group() as tasks:
            for _ in range(min(AHEAD, len(queue))):
                tasks.start_soon(self._work, now, queue)
        taken, ready = time.perf_counter_ns() - started, now.ready()
        if now.failure is not None and lease.state is not None:
            return now.failure  # rows alone do not continue a sequence that has a state beside them
        failure = await self.lane.run(partial(self._landed, request, now, ready))
        stop = max((move.span[1] for move in ready if move.kind == "rows"), default=effect.start)
        if failure is not None or stop == effect.start:
            return failure or now.failure or GIVEN_UP
        loaded = sum(map(self._bytes, ready))
        self.store.restored(lease.place, loaded, taken / 1e9)
        log.info(
            "request %d: %d tokens, %d bytes restored from %s in %.1f ms%s",
            *(request, stop - effect.start, loaded, lease.place, taken / 1e6),
            f"; then {now.failure.detail}" if now.failure else "",
        )
        return BlocksRestored(effect.start, stop, loaded, taken)

    def _fence(self, request: RequestId, slot: SlotId) -> Fence:
        fence = Fence(request)
        self.lane.submit(partial(self._reached, request, slot), fence.open)
        return fence

    def _reached(self, request: RequestId, slot: SlotId) -> StoreFailed | None:
        """On the lane: everything that was asked of it has been done."""
        self.lane.synchronize()
        state = self.serving(slot, request)
        return StoreFailed(state.kind, state.detail) if isinstance(state, DeviceFailed) else None

    async def _work(self, now: Restoring, queue: deque[Move]) -> None:
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

    async def _carry(self, now: Restoring, move: Move) -> None:
        """Into memory, and on into the slot; a checkpoint waits for the rows."""
        try:
            buffer = await self._fetched(move.part, partial(self._at_once, now, move))
        except Damaged as error:
            move.failure = StoreFailed("broken", str(error))
        except OSError as error:
            move.failure = StoreFailed("io", error.strerror or str(error))
        except MemoryError:
            move.failure = StoreFailed("out_of_memory", "no memory to read into")
        else:
            move.failure = move.failure or await now.fence.wait()
            if move.failure is None and not move.done:
                await self._into_slot(now.effect.slot, move, buffer)
        if move.kind != "rows" and move.failure is not None:
            log.warning("what goes with a target's rows is missing (%s): %s", move.kind, move.failure.detail)

    async def _into_slot(self, slot: SlotId, move: Move, buffer: Buffer) -> None:
        mover = self._movers.get(move.kind)
        if mover is None:
            move.buffer = buffer
        elif mover.anywhere:
            await self._beside(self._put, slot, move, mover, buffer)
        else:
            await self.lane.run(partial(self._put, slot, move, mover, buffer))

    async def _beside(self, work: Callable[..., T], *about: object) -> T:
        """On one of our threads. Nothing that a request waits for is done on those that the whole process shares."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *about)

    def _put(self, slot: SlotId, move: Move, mover: Mover, buffer: Buffer) -> None:
        try:
            mover.put(slot, move.span, buffer.data, move.part.entry.start)
            move.done = True
        except (ValueError, RuntimeError) as error:  # a device that finds no memory is a RuntimeError
            move.failure = StoreFailed("broken", str(error))

    def _at_once(self, now: Restoring, move: Move, buffer: Buffer) -> None:
        """On the thread that has read it: another one would have to be woken for the same."""
        self.store.promote(move.part.entry, buffer)
        mover = self._movers.get(move.kind)
        if mover is not None and mover.anywhere and now.fence.passed:
            self._put(now.effect.slot, move, mover, buffer)

    async def _fetched(self, part: Part, then: Callable[[Buffer], object]) -> Buffer:
        """Raises Damaged, OSError or MemoryError."""
        entry, disk = part.entry, self.store.disk
        if part.place == "host" or disk is None:
            return self.store.rows[entry.handle]
        return await disk.read(entry, self.store.memory, self.workers, then)

    def _landed(self, request: RequestId, now: Restoring, ready: list[Move]) -> StoreFailed | None:
        """On the lane: from now on the slot holds what has come."""
        state = self.serving(now.effect.slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        for move in ready:
            if move.kind == "rows":
                state.load(*move.span)
            else:
                state.draft(*move.span)
        checkpoints = [move for move in now.moves if move.kind == "state"]
        return self._put_state(state, now, checkpoints[0]) if checkpoints else None

    def _put_state(self, state: SlotState, now: Restoring, move: Move) -> StoreFailed | None:
        """Behind all rows: a front that is still computed would move it on."""
        slot, at, layout = now.effect.slot, now.effect.stop, self.store.layout
        if move.buffer is None:
            return move.failure or GIVEN_UP
        if not self.shard.state_specs or state.valid != at:
            return StoreFailed("broken", f"slot {slot} has {state.valid} rows: the state at {at} does not go with them")
        try:
            self.shard.import_state(slot, layout.views("state", move.buffer.data, 0))
        except (ValueError, RuntimeError) as error:
            return StoreFailed("broken", str(error))
        return None

    def _bytes(self, move: Move) -> int:
        return self.store.layout.size(move.kind, move.span[1] - move.span[0])

    def save(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSaved | DeviceFailed:
        """On the lane: copy out what no tier has, and leave the rest to the background."""
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        if not state.holds(effect.tokens):
            return DeviceFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        saved = self._save(effect.slot, effect.tokens)
        if "draft" in self._movers:
            start, stop = state.drafted
            saved += self._save(effect.slot, effect.tokens[:stop], "draft", start)
        log.info("request %d: %d tokens kept, %d bytes of them new", request, len(effect.tokens), saved)
        return SnapshotSaved(len(effect.tokens), saved)

    def _save(self, slot: SlotId, tokens: Tokens, kind: Kind = "rows", start: int = 0) -> int:
        """The bytes that are new."""
        saved = 0
        for run in self.store.gaps(tokens, kind, start):
            buffer = self.store.memory.take(self.store.layout.size(kind, run.length))
            self._movers[kind].take(slot, (run.start, run.stop), buffer.data)
            if not self.store.keep(run, buffer):
                break
            saved += buffer.data.nbytes
        return saved

    def checkpoint(self, request: RequestId, slot: SlotId, at: int) -> bool:
        """On the lane, when rows `[0, at)` have been computed: keep the state there. False if that was not possible."""
        state = self.serving(slot, request)
        if isinstance(state, DeviceFailed) or not self.shard.state_specs or not self.store.layout.state:
            return False
        if state.valid != at or at % self.store.layout.block_size or not at:
            log.warning("request %d: slot %d has %d rows, no checkpoint at %d", request, slot, state.valid, at)
            return False
        tokens = tuple(state.tokens[:at])
        if not self.store.lacks_checkpoint(tokens):
            return True
        return self.store.keep_checkpoint(tokens, self._gathered(self.shard.export_state(slot)))

    def _gathered(self, state: NamedTensors) -> Buffer:
        """End to end, as it is kept."""
        layout = self.store.layout
        buffer = self.store.memory.take(layout.size("state", 0))
        for name, view in layout.views("state", buffer.data, 0).items():
            view.copy_(state[name])
        return buffer


def moves(lease: Lease, effect: RestoreBlocks) -> Iterator[Move]:
    """What there is of the rows that are wanted, and the checkpoint."""
    for part in (*lease.parts, *lease.draft):
        start, stop = max(part.start, effect.start), min(part.stop, effect.stop)
        if start < stop:
            yield Move(part, (start, stop))
    if lease.state is not None:
        yield Move(lease.state, (lease.state.start, lease.state.stop))
