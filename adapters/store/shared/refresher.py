"""Keeps the index of a shared store up to date. Used by the shared tier, on the tier's own event loop.

A refresh lists the store, reads the beginnings of new objects, and takes part in garbage collection. It happens every
few seconds (`store_health.py`), and at once where `request` asks for it: another server has just published rows that
this one is about to need. Requests that come while a refresh runs wait for the next one, which serves all of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from attrs import define, field

from adapters.store.shared.availability import Availability
from adapters.store.shared.catalogue import Catalogue
from adapters.store.shared.garbage_collector import GarbageCollector
from adapters.store.shared.object_client import ObjectClient, ObjectFacts, StoreUnreachable

HEADS_AT_ONCE = 16  # beginnings of objects that are read at the same time
MAX_HEADS = 4096  # beginnings that one refresh reads; the next refresh follows at once where there are more


@define(eq=False)
class Refresher:
    """The refreshes of one tier. clock: as `read_clock`."""

    client: ObjectClient
    catalogue: Catalogue
    collector: GarbageCollector
    availability: Availability
    block_size: int
    clock: Callable[[], float]
    counts: Counter[str]
    # False if the last listing had more new objects than one refresh reads: then the next refresh follows at once. But
    # if many reads failed, it is True, because asking a store in trouble again at once would not help.
    is_listed: bool = False
    _requested: list[Future[bool]] = field(factory=list["Future[bool]"])  # guarded by the catalogue's lock
    _loop: asyncio.AbstractEventLoop | None = None
    _wake: asyncio.Event = field(factory=asyncio.Event)  # a refresh was requested

    def request(self) -> Future[bool]:
        """Ask for a refresh at once. Any thread may call it.

        The result says whether a listing that began after this call is in the index. It is False where the store
        cannot be used: a store in trouble is not asked more often than its pauses allow.
        """
        done = Future[bool]()
        with self.catalogue.lock:
            if self.availability.trouble or self._loop is None:
                done.set_result(False)
                return done
            self._requested.append(done)
            loop = self._loop
        with suppress(RuntimeError):  # the loop has ended, and `keep_refreshing` has answered
            loop.call_soon_threadsafe(self._wake.set)
        return done

    async def keep_refreshing(self) -> None:
        """Refresh until this is cancelled."""
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await self._refresh_once()
        finally:
            with self.catalogue.lock:
                self._loop = None
                waiting = self._take_requests()
            answer(waiting, is_listed=False)

    async def _refresh_once(self) -> None:
        """Refresh, answer those who asked before it began, and wait until the next refresh is due."""
        self._wake.clear()
        with self.catalogue.lock:
            waiting = self._take_requests()
        began_s = self.clock()
        try:
            await self._refresh()
            is_usable = not self.availability.trouble
            if is_usable and not self.is_listed:
                with self.catalogue.lock:
                    self._requested += waiting  # the next refresh reads what is left
                waiting = []
        except BaseException:
            answer(waiting, is_listed=False)
            raise
        answer(waiting, is_listed=is_usable)
        if is_usable and not self.is_listed:
            return
        pause_s = self.availability.choose_pause(self.clock() - began_s)
        if not is_usable:
            await asyncio.sleep(pause_s)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause_s)

    def _take_requests(self) -> list[Future[bool]]:
        """Return the requests, which are no longer waiting for the next refresh. Called with the lock."""
        waiting = self._requested
        self._requested = []
        return waiting

    async def _refresh(self) -> None:
        """Bring the index up to date, and take part in garbage collection. A failure takes the tier away."""
        try:
            if self.availability.trouble:
                await self.collector.write_report()  # before anything is listed: this server is there again
            await self.collector.read_marks()
            await self._read_listing()
            await self.collector.write_report()
            self.availability.accept_refresh()
            await self.collector.collect()
        except StoreUnreachable as error:
            self.availability.report_failure(f"listing failed: {error}")

    async def _read_listing(self) -> None:
        """List the runs, and read the beginnings of new ones. Those that cannot be read are tried again next time."""
        self.catalogue.begin_listing()
        new = self.catalogue.take_listing(await self.client.list_objects(self.catalogue.root.hex()))
        waiting = deque(new[:MAX_HEADS])
        failed = list[ObjectFacts]()

        async def read_heads() -> None:
            while waiting and len(failed) < HEADS_AT_ONCE:
                facts = waiting.popleft()
                try:
                    await self.catalogue.read_head(self.client, facts, self.block_size)
                except StoreUnreachable:  # of one object, while others are listed: no outage
                    self.counts["read_errors"] += 1
                    failed.append(facts)

        await asyncio.gather(*(read_heads() for _ in range(min(HEADS_AT_ONCE, len(waiting)))))
        self.is_listed = len(new) <= MAX_HEADS or len(failed) >= HEADS_AT_ONCE


def answer(waiting: list[Future[bool]], *, is_listed: bool) -> None:
    """Answer requests for a refresh, except those that were cancelled."""
    for done in waiting:
        if done.set_running_or_notify_cancel():
            done.set_result(is_listed)
