"""Reads a prompt on this server and publishes its rows in the shared tier, so that another server can restore them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from anyio import to_thread
from attrs import define, evolve, frozen

from adapters.store.shared.shared_tier import SharedTier
from adapters.store.store import Store
from effects.job import Job
from effects.ports import Closed
from effects.scope import Scope
from engine.core.submission import Submissions


@frozen
class PublishedPrompt:
    """What came of reading a prompt. tokens: of it that any server can restore from the shared tier now."""

    closed: Closed
    tokens: int


def make_reading_job(job: Job) -> Job | None:
    """Return the job that reads the prompt of another one, and keeps all of it; None if nothing may be kept of it.

    It generates one token, as every job does at least.
    """
    if job.scope.kind == "off":
        return None
    sampling = evolve(job.sampling, logprobs=-1)
    return evolve(
        job, max_tokens=1, sampling=sampling, scope=Scope("full"), one_off=None, speculate=False, prompt_logprobs=-1
    )


@define(eq=False)
class PromptPublisher:
    """Publishes prompts. Used in the event loop of the server."""

    submissions: Submissions
    store: Store[Any]
    tier: SharedTier

    async def publish(self, job: Job) -> PublishedPrompt:
        """Read the prompt of a job, and wait until everything that is kept of it has been written or given up.

        Where this is cancelled, so is the job.
        """
        ticket = self.submissions.submit(job)
        closed: Closed | None = None
        try:
            async for message in ticket:
                if isinstance(message, Closed):
                    closed = message
        finally:
            ticket.cancel("client_gone")
        assert closed is not None, "every stream ends with its last message"
        if closed.finish not in {"stop", "length"}:
            return PublishedPrompt(closed, 0)
        # Its rows are taken out of the slot after the stream has ended.
        await self.submissions.wait_until_ended(ticket.request)
        await asyncio.wrap_future(self.tier.watch_writes())
        tokens = await self._count_published(job)
        block_size = self.store.layout.block_size
        if tokens < (len(job.prompt) - 1) // block_size * block_size:
            # Another server may have written the same runs; a listing brings them.
            await asyncio.wrap_future(self.tier.request_refresh())
            tokens = await self._count_published(job)
        return PublishedPrompt(closed, tokens)

    async def _count_published(self, job: Job) -> int:
        count = partial(self.store.count_restorable_tokens, job.prompt, self.tier.name, job.salt)
        return await to_thread.run_sync(count)
