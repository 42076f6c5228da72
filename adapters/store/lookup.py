"""Carries lookups out: which prefix of a prompt is kept, and what it shares with recent prompts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, TypeAlias

import anyio
from anyio import to_thread
from attrs import define, field

from adapters.store.lease import Miss
from adapters.store.store import Store
from effects.ids import RequestId
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.ports import Divergence

log = logging.getLogger("rekindle.store")

Found: TypeAlias = PrefixFound | PrefixMissed

LONG = 8192  # tokens: a longer prompt is looked up beside the event loop
MOST_TOLD = 4096  # requests; of each some 64 token ids
BESIDE = 2  # lookups that hash beside it at once: more would take the interpreter from each other


@define(eq=False)
class Lookup:
    """Called on the event loop."""

    store: Store[Any]
    limiter: anyio.CapacityLimiter = field(factory=lambda: anyio.CapacityLimiter(BESIDE))
    diverged: dict[RequestId, Divergence] = field(factory=dict[RequestId, Divergence])  # to be told at its end

    def find(self, request: RequestId, effect: FindPrefix) -> Found | Awaitable[Found]:
        if len(effect.prompt) < LONG:
            return self._find(request, effect)
        return to_thread.run_sync(self._find, request, effect, limiter=self.limiter)

    def release(self, _: RequestId, effect: ReleasePrefix) -> None:
        self.store.release(effect.lease)

    def _remember(self, request: RequestId, *found: Divergence | None) -> None:
        """A lookup may end after its request: what nobody takes is dropped in the end."""
        there = [one for one in (*found, self.diverged.get(request)) if one is not None]
        if there:
            self.diverged[request] = max(there, key=lambda one: one.at)
        for other in [*self.diverged][: max(0, len(self.diverged) - MOST_TOLD)]:
            self.diverged.pop(other, None)

    def _find(self, request: RequestId, effect: FindPrefix) -> Found:
        shared, recent = self.store.compare(effect.prompt, effect.window, effect.salt) if effect.window else (0, None)
        found = self.store.find(effect.prompt, effect.beyond, effect.rows, effect.salt)
        about = {"request": request}
        self._remember(request, recent, (found if isinstance(found, Miss) else found[1]).diverged)
        if isinstance(found, Miss):
            log.info("request %d: nothing kept beyond %d tokens: %s", request, effect.beyond, found.reason, extra=about)
            return PrefixMissed(found.reason, shared=shared, length=found.length)
        name, lease = found
        kept = lease.length, len(effect.prompt), lease.place
        log.info("request %d: %d of %d tokens are kept (%s)", request, *kept, extra=about)
        return PrefixFound(name, lease.length, lease.place, shared=shared, checkpoints=lease.checkpoints)
