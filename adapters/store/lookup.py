"""Looks prompts up: which prefix of a prompt is kept, and what the prompt shares with recent prompts."""

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

LookupOutcome: TypeAlias = PrefixFound | PrefixMissed

# Tokens: a longer prompt is looked up on a thread of its own. Hashing this many takes 2 ms. A thread also
# waits for the interpreter while decode steps run: with 16 sessions, answers came after 86 ms at the median.
LONG_PROMPT = 65_536
MAX_REMEMBERED = 4096  # requests; each takes some 64 token ids
HASHING_THREADS = 2  # lookups that hash on threads at once; more would compete for the interpreter


@define(eq=False)
class Lookup:
    """The lookups of a server. It is called on the event loop."""

    store: Store[Any]
    limiter: anyio.CapacityLimiter = field(factory=lambda: anyio.CapacityLimiter(HASHING_THREADS))
    divergences: dict[RequestId, Divergence] = field(factory=dict[RequestId, Divergence])  # for reports

    def find_prefix(self, request: RequestId, effect: FindPrefix) -> LookupOutcome | Awaitable[LookupOutcome]:
        """Look a prompt up: at once if it is short, and otherwise on a thread, since hashing it takes long."""
        if len(effect.prompt) < LONG_PROMPT:
            return self._look_up(request, effect)
        return to_thread.run_sync(self._look_up, request, effect, limiter=self.limiter)

    def release_prefix(self, _: RequestId, effect: ReleasePrefix) -> None:
        """Release a lease from which nothing will be restored."""
        self.store.release(effect.lease)

    def _remember_divergence(self, request: RequestId, *found: Divergence | None) -> None:
        """Keep where the prompt diverged, for the report.

        A lookup may end after its request, so the oldest are dropped.
        """
        there = [divergence for divergence in (*found, self.divergences.get(request)) if divergence is not None]
        if there:
            self.divergences[request] = max(there, key=lambda divergence: divergence.at)
        for other in [*self.divergences][: max(0, len(self.divergences) - MAX_REMEMBERED)]:
            self.divergences.pop(other, None)

    def _look_up(self, request: RequestId, effect: FindPrefix) -> LookupOutcome:
        shared = 0
        recent = None
        if effect.prompts_to_compare:
            shared, recent = self.store.compare_recent(effect.prompt, effect.prompts_to_compare, effect.salt)
        found = self.store.find_prefix(effect.prompt, effect.beyond, effect.rows, effect.salt)
        about = {"request": request}
        self._remember_divergence(request, recent, (found if isinstance(found, Miss) else found[1]).diverged)
        if isinstance(found, Miss):
            log.info(
                "request %d: the cache holds nothing beyond %d tokens: %s",
                request,
                effect.beyond,
                found.reason,
                extra=about,
            )
            return PrefixMissed(found.reason, shared=shared, length=found.length)
        name, lease = found
        kept = lease.length, len(effect.prompt), lease.tier
        log.info("request %d: the cache holds %d of %d tokens (%s)", request, *kept, extra=about)
        return PrefixFound(name, lease.length, lease.tier, shared=shared, checkpoints=lease.checkpoints)
