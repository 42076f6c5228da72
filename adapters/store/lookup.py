"""Carries lookups out: which prefix of a prompt is kept, and what it shares with recent prompts."""

from __future__ import annotations

import logging
from typing import Any

import anyio
from anyio import to_thread
from attrs import define, field

from adapters.store.lease import Miss
from adapters.store.store import Store
from effects.ids import RequestId
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix

log = logging.getLogger("rekindle.store")

LONG = 8192  # tokens: a longer prompt is looked up beside the event loop
BESIDE = 2  # lookups that hash beside it at once: more would take the interpreter from each other


@define(eq=False)
class Lookup:
    """Called on the event loop."""

    store: Store[Any]
    limiter: anyio.CapacityLimiter = field(factory=lambda: anyio.CapacityLimiter(BESIDE))

    async def find(self, request: RequestId, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        if len(effect.prompt) < LONG:
            return self._find(request, effect)
        return await to_thread.run_sync(self._find, request, effect, limiter=self.limiter)

    def release(self, _: RequestId, effect: ReleasePrefix) -> None:
        self.store.release(effect.lease)

    def _find(self, request: RequestId, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        shared = self.store.joins(effect.prompt, effect.window, effect.salt) if effect.window else 0
        found = self.store.find(effect.prompt, effect.beyond, effect.rows, effect.salt)
        if isinstance(found, Miss):
            log.info("request %d: nothing kept beyond %d tokens: %s", request, effect.beyond, found.reason)
            return PrefixMissed(found.reason, shared=shared, length=found.length)
        name, lease = found
        log.info("request %d: %d of %d tokens are kept (%s)", request, lease.length, len(effect.prompt), lease.place)
        return PrefixFound(name, lease.length, lease.place, shared=shared, checkpoints=lease.checkpoints)
