"""Carries store effects out: finds prefixes, brings rows back through the device lane, and takes new rows in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import anyio
from attrs import define, field
from torch import Tensor

from adapters.device.lane import DeviceLane
from adapters.device.slots import SlotState
from adapters.models.shard import Shard
from adapters.store.seekable import Damaged
from adapters.store.store import Lease, Part, Store
from effects.ids import DeviceFailed, RequestId, StoreFailed
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved

log = logging.getLogger("rekindle.store")

Rows: TypeAlias = Mapping[str, Tensor]
AHEAD = 3  # runs that are read at once: one reader alone leaves a disk idle between its reads
GIVEN_UP = StoreFailed("abandoned", "the request was abandoned")
# The state of a slot, if it was opened for this request; asked on the lane.
Serving: TypeAlias = Callable[[int, RequestId], SlotState | DeviceFailed]


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
    rows: Rows = field(factory=dict[str, Tensor])
    failure: StoreFailed | None = None


@define(eq=False)
class StoreExecutor:
    """find, restore, release and abandon are called on the event loop, save on the lane."""

    store: Store
    shard: Shard
    lane: DeviceLane
    serving: Serving
    _restoring: dict[RequestId, Restoring] = field(factory=dict[RequestId, Restoring])

    async def find(self, request: RequestId, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        found = self.store.find(effect.prompt, effect.beyond)
        if isinstance(found, str):
            log.info("request %d: nothing kept beyond %d tokens: %s", request, effect.beyond, found)
            return PrefixMissed(found)
        name, lease = found
        log.info("request %d: %d of %d tokens are kept (%s)", request, lease.length, len(effect.prompt), lease.place)
        return PrefixFound(name, lease.length, lease.place, round(self.store.load_ns[lease.place].value))

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
        if now.failure is None:
            self.store.load_ns[lease.place].add(taken / tokens)
        log.info(
            "request %d: %d tokens, %d bytes restored from %s in %.1f ms%s",
            *(request, tokens, now.bytes, lease.place, taken / 1e6),
            f"; then {now.failure.detail}" if now.failure else "",
        )
        if now.failure is not None and not tokens:
            return now.failure
        return BlocksRestored(effect.start, now.stop, now.bytes)

    async def _restore(self, request: RequestId, effect: RestoreBlocks, lease: Lease, now: Restoring) -> None:
        """Runs are put into the slot in order, while the next ones are read side by side."""
        wanted = [part for part in lease.parts if part.start < effect.stop and part.stop > effect.start]
        fetches = [Fetch(part) for part in wanted]
        async with anyio.create_task_group() as tasks:
            for fetch in fetches[:AHEAD]:
                tasks.start_soon(self._fetch, fetch)
            for fetch, later in zip_longest(fetches, fetches[AHEAD:]):
                await fetch.ready.wait()
                now.failure = GIVEN_UP if now.abandoned else fetch.failure
                if now.failure is None:
                    now.failure = await self._place(request, effect, fetch, now)
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
        part, rows, fetch.rows = fetch.part, fetch.rows, {}
        start, stop, first = max(part.start, effect.start), min(part.stop, effect.stop), part.entry.start
        piece = {name: tensor[:, start - first : stop - first] for name, tensor in rows.items()}
        failure = await self.lane.run(partial(self._put, request, effect.slot, start, stop, piece))
        if failure is None:
            now.stop = stop
            now.bytes += sum(tensor.nbytes for tensor in piece.values())
        return failure

    async def _rows(self, part: Part) -> Rows:
        entry, disk = part.entry, self.store.disk
        if part.place == "host" or disk is None:
            return self.store.rows[entry.handle]
        started = time.perf_counter()
        rows = disk.layout.views(await disk.read(entry), entry.length)
        disk.chooser.read.add(entry.size / (time.perf_counter() - started))
        self.store.promote(entry, rows)
        return rows

    def _put(self, request: RequestId, slot: int, start: int, stop: int, rows: Rows) -> StoreFailed | None:
        """On the lane: into the slot, if it still serves this request."""
        state = self.serving(slot, request)
        if isinstance(state, DeviceFailed):
            return StoreFailed(state.kind, state.detail)
        try:
            self.shard.import_rows(slot, start, rows)
        except (ValueError, RuntimeError) as error:  # a device that finds no memory is a RuntimeError
            return StoreFailed("broken", str(error))
        state.load(start, stop)
        return None

    def save(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSaved | DeviceFailed:
        """On the lane: copy out what no tier has, and leave the rest to the background."""
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        if not state.holds(effect.tokens):
            return DeviceFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        saved = 0
        for start, stop in self.store.gaps(effect.tokens):
            rows = self.shard.export_rows(effect.slot, start, stop)
            if not self.store.keep(effect.tokens[:stop], start, rows):
                break
            saved += sum(tensor.nbytes for tensor in rows.values())
        log.info("request %d: %d tokens kept, %d bytes of them new", request, len(effect.tokens), saved)
        return SnapshotSaved(len(effect.tokens), saved)
