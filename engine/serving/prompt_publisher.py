"""Reads a prompt on this server and publishes its rows in the shared tier, so that another server can restore them.

The other server describes the prompt (`PromptOrder`), because its tokens may be known there only: those of earlier
answers are remembered by the server that has given them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from anyio import to_thread
from attrs import define, frozen

from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.request.plan_jobs import PlannedJob
from adapters.store.block_keys import pack_tokens, unpack_tokens
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.store import Store
from effects.ids import Tokens
from effects.job import Job
from effects.ports import Closed
from effects.scope import Scope
from engine.core.submission import Submissions


class PromptOrder(msgspec.Struct, frozen=True):
    """A prompt on the wire. tokens: packed (`block_keys.py`). boundaries: as `Job` has them.

    salt: that the request has named, as a digest. The reader makes it the caller's own, as it does with any request.
    """

    tokens: bytes
    boundaries: list[int]
    salt: str

    def get_tokens(self) -> Tokens:
        """Return the tokens. Raises ValueError where the bytes are none."""
        return unpack_tokens(self.tokens)


@frozen
class PublishedPrompt:
    """The result of reading a prompt. closed: the end of its job. tokens: how many of the prompt any server can restore
    from the shared tier now.
    """

    closed: Closed
    tokens: int


def describe_prompt(parsed: ParsedRequest[Any], planned_jobs: Sequence[PlannedJob]) -> PromptOrder | None:
    """Return what has to be read for the first prompt of a request; None if its rows would be of no use.

    That is so where nothing is kept of it, or where it may be compressed before it is read.
    """
    job = planned_jobs[0].job
    if job.scope.kind == "off" or job.compression.mode != "off" or job.compression.parts:
        return None
    return PromptOrder(pack_tokens(job.prompt), list(job.boundaries), parsed.controls.salt)


def read_order(message: bytes | bytearray, vocab: int, max_ctx: int) -> PromptOrder:
    """Return the order in a message. Raises ValueError if it is none, or if its prompt cannot be."""
    try:
        order = msgspec.msgpack.decode(message, type=PromptOrder)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    tokens = order.get_tokens()
    if not 0 < len(tokens) < max_ctx or min(tokens) < 0 or max(tokens) >= vocab:
        raise ValueError(f"a prompt of {len(tokens)} tokens; accepted: 1 to {max_ctx - 1}, each below {vocab}")
    edges = [0, *order.boundaries, len(tokens)]
    if edges != sorted(edges):
        raise ValueError("boundaries that do not lie in the prompt in order")
    return order


def make_reading_job(order: PromptOrder, salt: str) -> Job:
    """Return the job that reads a prompt and keeps all of it. It generates one token, as every job does at least.

    salt: the caller's own.
    """
    return Job(
        prompt=order.get_tokens(),
        max_tokens=1,
        scope=Scope("full"),
        boundaries=tuple(order.boundaries),
        speculate=False,
        salt=salt,
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
