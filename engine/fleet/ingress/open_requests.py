"""The requests that an ingress is answering: how many they may be, and that they may end before the fleet does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
from attrs import define, field

MOST_REQUESTS: Final = 4096  # that an ingress answers at once: as many connections as a server has


@define(eq=False)
class OpenRequests:
    """Counts requests. Used in the event loop of the ingress."""

    count: int = field(default=0, init=False)
    is_draining: bool = field(default=False, init=False)
    _all_ended: anyio.Event = field(factory=anyio.Event, init=False)

    @property
    def is_full(self) -> bool:
        return self.count >= MOST_REQUESTS

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count a request for as long as the block runs."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self._notify()

    async def drain(self, grace_s: float) -> int:
        """Take no more requests, and wait until all have ended, at most so long. Return how many have not."""
        self.is_draining = True
        self._notify()
        with anyio.move_on_after(grace_s):
            await self._all_ended.wait()
        return self.count

    def _notify(self) -> None:
        if self.is_draining and not self.count:
            self._all_ended.set()
