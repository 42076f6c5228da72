"""An object store in memory, whose operations are steps of a schedule, and servers that use it with skewed clocks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from datetime import UTC, datetime
from typing import Any

from attrs import define, field

from adapters.store.block_index import BlockIndex
from adapters.store.shared.availability import STALE_S
from adapters.store.shared.catalogue import Catalogue
from adapters.store.shared.garbage_collector import GarbageCollector
from adapters.store.shared.object_client import ObjectExists, ObjectFacts, StoreUnreachable
from adapters.store.shared.publish_policy import SharedLimits
from tests.store.kit import BLOCK_SIZE, LAYOUT

ROOT = LAYOUT.compute_root("rows")


class Turn:
    """A point at which another server may go on."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@define(eq=False)
class FakeStore:
    """The objects: name -> (content, version, time as its writer stamps it)."""

    objects: dict[str, tuple[bytes, int, float]] = field(factory=dict)
    removing: Callable[[str], None] = lambda _: None  # called before a run is removed
    is_lost: bool = False
    _version: int = 0

    def put(self, name: str, content: bytes, stamp: float) -> None:
        self._version += 1
        self.objects[name] = (content, self._version, stamp)


@define(eq=False)
class FakeClient:
    """The view that one server has of the store. stamp: the time with which its objects are stamped."""

    store: FakeStore
    stamp: Callable[[], float]

    async def _step(self) -> None:
        await Turn()
        if self.store.is_lost:
            raise StoreUnreachable("lost")

    async def list_objects(self, folder: str) -> list[ObjectFacts]:
        await self._step()
        return [
            ObjectFacts(name, len(content), datetime.fromtimestamp(stamp, UTC), str(version))
            for name, (content, version, stamp) in self.store.objects.items()
            if name.startswith(folder + "/")
        ]

    async def list_folders(self) -> list[str]:
        await self._step()
        return sorted({name.partition("/")[0] for name in self.store.objects})

    async def read_range(self, name: str, start: int, stop: int) -> memoryview:
        await self._step()
        if name not in self.store.objects:
            raise FileNotFoundError(name)
        return memoryview(self.store.objects[name][0])[start:stop]

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        await self._step()
        if name in self.store.objects and not replace:
            raise ObjectExists
        self.store.put(name, b"".join(parts), self.stamp())

    async def remove_object(self, name: str) -> None:
        await self._step()
        self.store.removing(name)
        self.store.objects.pop(name, None)


@define(eq=False)
class FakeServer:
    """One server: its catalogue and its part in the protocol, without a thread. It is driven step by step."""

    store: FakeStore
    number: int
    now: Callable[[], float]  # true seconds
    skew_s: float
    limits: SharedLimits
    catalogue: Catalogue = field(init=False)
    collector: GarbageCollector = field(init=False)
    refreshed_s: float = -STALE_S
    working: Coroutine[Any, Any, None] | None = None

    def __attrs_post_init__(self) -> None:
        index = BlockIndex(0, BLOCK_SIZE, ROOT)
        self.catalogue = Catalogue(ROOT, index, threading.RLock())
        client: Any = FakeClient(self.store, self.read_clock)
        name = f"{self.number:016x}"
        self.collector = GarbageCollector(client, self.catalogue, name, self.limits, self.read_clock, Counter[str]())

    def read_clock(self) -> float:
        return self.now() + self.skew_s

    @property
    def is_usable(self) -> bool:
        return self.now() - self.refreshed_s < STALE_S

    async def refresh(self) -> None:
        """Do things in the order of `Refresher._refresh`."""
        if not self.is_usable:
            await self.collector.write_report()
        await self.collector.read_marks()
        client = self.collector.client
        self.catalogue.begin_listing()
        for facts in self.catalogue.take_listing(await client.list_objects(ROOT.hex())):
            await self.catalogue.read_head(client, facts, BLOCK_SIZE)
        await self.collector.write_report()
        self.refreshed_s = self.now()
        await self.collector.collect()

    def advance(self) -> bool:
        """Go on to the next operation on the store; begin a refresh if none is under way. True: it has ended."""
        if self.working is None:
            self.working = self.refresh()
        try:
            self.working.send(None)
        except StopIteration:
            self.working = None
            return True
        return False

    def stop(self) -> None:
        if self.working is not None:
            self.working.close()
            self.working = None
