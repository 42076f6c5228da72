"""Carries store effects out: finds prefixes, brings rows back through the device lane, and takes new rows in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Protocol, TypeAlias, TypeGuard

import anyio
from anyio import to_thread
from attrs import define, field

from adapters.device.lane import DeviceLane
from adapters.device.slots import SlotState
from adapters.models.shard import NamedTensors, Shard
from adapters.store.format import Kind
from adapters.store.memory import Buffer
from adapters.store.seekable import Damaged
from adapters.store.store import Lease, Miss, Part, Store
from effects.ids import DeviceFailed, RequestId, SlotId, Span, StoreFailed, Tokens
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved

log = logging.getLogger("rekindle.store")

AHEAD = 3  # runs that are read at once: one reader alone leaves a disk idle between its reads
GIVEN_UP = StoreFailed("abandoned", "the request was abandoned")
LONG = 8192  # tokens: a longer prompt is looked up beside the event loop
# The state of a slot, if it was opened for this request; asked on the lane.
Serving: TypeAlias = Callable[[int, RequestId], SlotState | DeviceFailed]


class DraftRows(Protocol):
    """The draft's context rows of each slot. Called on the lane."""

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors: ...

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None: ...


class Stateful(Protocol):
    """A shard whose slots have a state at their last position that is not made of rows. Called on the lane."""

    def export_state(self, slot: int) -> NamedTensors: ...

    def import_state(self, slot: int, tensors: NamedTensors) -> None: ...


@define(eq=False)
class Restoring:
    """How far one restore has come."""

    stop: int  # rows up to here are on the device
    bytes: int = 0
    abandoned: bool = False
    failure: StoreFailed | None = None


@define(eq=False)
class Fetch:
    """One run on its way into memory."""

    part: Part
    ready: anyio.Event = field(factory=anyio.Event)
    rows: Buffer | None = None
    failure: StoreFailed | None = None


@define(eq=False)
class StoreExecutor:
    """find, restore, release and abandon are called on the event loop, save and checkpoint on the lane.

    draft: where there is one, its rows are kept and restored with the target's.
    """

    store: Store
    shard: Shard
    lane: DeviceLane
    serving: Serving
    draft: DraftRows | None = None
    _restoring: dict[RequestId, Restoring] = field(factory=dict[RequestId, Restoring])

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

    def abandon(self, request: RequestId) -> None:
        """A restore in flight stops after the run that it is at."""
        if (restoring := self._restoring.get(request)) is not None:
            restoring.abandoned = True

    async def restore(self, request: RequestId, effect: RestoreBlocks) -> BlocksRestored | StoreFailed:
        """What really came, without a gap from `start` on. The lease is released whatever happens."""
        lease, started = self.store.lease(effect.lease), time.perf_counter_ns()
        self._restoring[request] = now = Restoring(effect.start)
        try:
            await self._restore(request, effect, lease, now)
        finally:
            del self._restoring[request]
            self.store.release(effect.lease)
        taken = time.perf_counter_ns() - started
        tokens = now.stop - effect.start
        log.info(
            "request %d: %d tokens, %d bytes restored from %s in %.1f ms%s",
            *(request, tokens, now.bytes, lease.place, taken / 1e6),
            f"; then {now.failure.detail}" if now.failure else "",
        )
        if now.failure is not None and (not tokens or lease.state is not None):
            return now.failure  # rows alone do not continue a sequence that has a state beside them
        return BlocksRestored(effect.start, now.stop, now.bytes, taken)

    async def _restore(self, request: RequestId, effect: RestoreBlocks, lease: Lease, now: Restoring) -> None:
        """Runs are put into the slot in order, while the next ones are read side by side."""
        if lease.state is not None and effect.stop != lease.length:
            now.failure = StoreFailed("broken", f"the checkpoint is at {lease.length}, not at {effect.stop}")
            return
        fetches = [Fetch(part) for part in wanted(lease, effect.start, effect.stop)]
        async with anyio.create_task_group() as tasks:
            for fetch in fetches[:AHEAD]:
                tasks.start_soon(self._fetch, fetch)
            for fetch, later in zip_longest(fetches, fetches[AHEAD:]):
                await fetch.ready.wait()
                now.failure = GIVEN_UP if now.abandoned else fetch.failure
                if now.failure is None:
                    now.failure = await self._place(request, effect, fetch, now)
                if now.failure is not None and fetch.part.entry.kind == "draft" and not now.abandoned:
                    log.warning("request %d: a draft's rows are missing: %s", request, now.failure.detail)
                    now.failure = None  # the target goes on without them
                if now.failure is not None:
                    return
                if later is not None:
                    tasks.start_soon(self._fetch, later)

    async def _fetch(self, fetch: Fetch) -> None:
        try:
            fetch.rows = await self._rows(fetch.part)
        except Damaged as error:
            fetch.failure = StoreFailed("broken", str(error))
        except OSError as error:
            fetch.failure = StoreFailed("io", error.strerror or str(error))
        except MemoryError:
            fetch.failure = StoreFailed("out_of_memory", "no memory to read into")
        fetch.ready.set()

    async def _place(
        self, request: RequestId, effect: RestoreBlocks, fetch: Fetch, now: Restoring
    ) -> StoreFailed | None:
        part, buffer, fetch.rows = fetch.part, fetch.rows, None
        assert buffer is not None, "it came, or there is a failure"
        tensors = self.store.layout.views(part.entry.kind, buffer.data, part.entry.length)
        start, stop = max(part.start, effect.start), min(part.stop, effect.stop)
        if part.entry.kind != "state":
            first = part.entry.start
            tensors = {name: tensor[:, start - first : stop - first] for name, tensor in tensors.items()}
        failure = await self.lane.run(partial(self._put, request, effect.slot, part.entry.kind, (start, stop), tensors))
        if failure is None:
            now.stop = stop if part.entry.kind == "rows" else now.stop
            now.bytes += sum(tensor.nbytes for tensor in tensors.values())
        return failure

    async def _rows(self, part: Part) -> Buffer:
        entry, disk = part.entry, self.store.disk
        if part.place == "host" or disk is None:
            return self.store.rows[entry.handle]
        started = time.perf_counter()
        buffer = self.store.memory.take(disk.layout.size(entry.kind, entry.length))
        await to_thread.run_sync(disk.read, entry, buffer.data.numpy().data)
        disk.chooser.read.add(entry.size / (time.perf_counter() - started))
        self.store.promote(entry, buffer)
        return buffer

    def _put(
        self, request: RequestId, slot: SlotId, kind: Kind, span: Span, tensors: NamedTensors
    ) -> StoreFailed | None:
        """On the lane: into the slot, if it still serves this request."""
        state = self.serving(slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        try:
            if kind == "rows":
                self.shard.import_rows(slot, span[0], tensors)
                state.load(*span)
            elif kind == "draft" and self.draft is not None:
                self.draft.import_rows(slot, span[0], tensors)
                state.draft(*span)
            elif kind == "state":
                return self._put_state(slot, state, span[1], tensors)
        except (ValueError, RuntimeError) as error:  # a device that finds no memory is a RuntimeError
            return StoreFailed("broken", str(error))
        return None

    def _put_state(self, slot: SlotId, state: SlotState, at: int, tensors: NamedTensors) -> StoreFailed | None:
        """Behind all rows: a front that is still computed would move it on."""
        if not has_state(self.shard) or state.valid != at:
            return StoreFailed("broken", f"slot {slot} has {state.valid} rows: the state at {at} does not go with them")
        self.shard.import_state(slot, tensors)
        return None

    def save(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSaved | DeviceFailed:
        """On the lane: copy out what no tier has, and leave the rest to the background."""
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        if not state.holds(effect.tokens):
            return DeviceFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        saved = self._save(effect.slot, effect.tokens)
        if self.draft is not None and self.store.layout.draft is not None:
            start, stop = state.drafted
            saved += self._save(effect.slot, effect.tokens[:stop], "draft", start)
        log.info("request %d: %d tokens kept, %d bytes of them new", request, len(effect.tokens), saved)
        return SnapshotSaved(len(effect.tokens), saved)

    def _save(self, slot: SlotId, tokens: Tokens, kind: Kind = "rows", start: int = 0) -> int:
        """The bytes that are new."""
        saved, source = 0, self.shard if kind == "rows" or self.draft is None else self.draft
        for first, stop in self.store.gaps(tokens, kind, start):
            buffer = self._gathered(kind, source.export_rows(slot, first, stop), stop - first)
            if not self.store.keep(tokens[:stop], first, buffer, kind):
                break
            saved += buffer.data.nbytes
        return saved

    def checkpoint(self, request: RequestId, slot: SlotId, at: int) -> bool:
        """On the lane, when rows `[0, at)` have been computed: keep the state there. False if that was not possible."""
        state = self.serving(slot, request)
        if isinstance(state, DeviceFailed) or not has_state(self.shard) or not self.store.layout.state:
            return False
        if state.valid != at or at % self.store.layout.grain or not at:
            log.warning("request %d: slot %d has %d rows, no checkpoint at %d", request, slot, state.valid, at)
            return False
        tokens = tuple(state.tokens[:at])
        if not self.store.lacks_checkpoint(tokens):
            return True
        return self.store.keep_checkpoint(tokens, self._gathered("state", self.shard.export_state(slot), 0))

    def _gathered(self, kind: Kind, tensors: NamedTensors, tokens: int) -> Buffer:
        """End to end, as they are kept."""
        layout = self.store.layout
        buffer = self.store.memory.take(layout.size(kind, tokens))
        for name, view in layout.views(kind, buffer.data, tokens).items():
            view.copy_(tensors[name])
        return buffer


def has_state(shard: object) -> TypeGuard[Stateful]:
    return hasattr(shard, "export_state") and hasattr(shard, "import_state")


def wanted(lease: Lease, start: int, stop: int) -> list[Part]:
    """What there is of rows `[start, stop)`, and the checkpoint, which comes last."""
    rows = [part for part in (*lease.parts, *lease.draft) if part.start < stop and part.stop > start]
    return rows if lease.state is None else [*rows, lease.state]
