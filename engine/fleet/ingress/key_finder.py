"""Finds the block keys of a request: in what is known of its conversation, or by reading its prompt.

A request of a conversation that was read before waits for nothing. Its prompt is read when it has been answered, for
the conversation's next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import anyio
from attrs import define, field

from adapters.http.wire.errors import ApiError
from adapters.http.wire.read_body import INLINE_BYTES, parse_body
from engine.fleet.ingress.known_prompts import ConversationDigests, KnownPrompts
from engine.fleet.ingress.prompt_keys import PromptReader
from engine.fleet.ingress.reading_thread import ReadingThread
from engine.fleet.replica_facts import ReplicaFacts
from engine.fleet.router.route_keys import RouteKeys


@define(eq=False)
class FoundKeys:
    """The result of a search. route: the keys, or None if the request has no prompt. read_later: reads the whole
    prompt; None if nothing is left to read.
    """

    route: RouteKeys | None
    read_later: Callable[[], None] | None = None


@define(eq=False)
class KeyFinder:
    """Finds the keys of requests. Used in the event loop of the ingress.

    most_bytes: of bodies that wait to be read after their answers. Others are not read.
    """

    reader: PromptReader
    most_bytes: int
    thread: ReadingThread = field(factory=ReadingThread)
    known: KnownPrompts = field(factory=KnownPrompts)
    waiting_bytes: int = field(default=0, init=False)  # of bodies that will be read
    _turn: anyio.Lock = field(factory=anyio.Lock, init=False)  # of prompts that are read later, one at a time

    async def find_keys(self, path: str, body: bytearray, owner: str, facts: ReplicaFacts) -> FoundKeys:
        """Find the keys of a request's first prompt, or of the part of it that is known.

        A prompt of a new conversation is read before this returns, on a thread. The route is None if the body is no
        JSON object or has no prompt.

        owner: a name for the caller's key. facts: of any replica.
        """
        read = partial(self.reader.find_keys, path, body, owner, facts)
        about = f"{path} {owner} {facts.identity} {facts.block_size}"
        if len(body) < INLINE_BYTES:
            conversation = await self._read_conversation(body, about)
        else:
            conversation = await self.thread.run(partial(self._read_conversation, body, about))
        if conversation is None:
            return FoundKeys(None)
        known = self.known.find(conversation)
        if known is None:
            route = await self.thread.run(read)
            self._note(conversation, route)
            return FoundKeys(route)
        if known.is_whole:
            return FoundKeys(known.route)
        return FoundKeys(known.route, partial(self._read_later, conversation, read, len(body)))

    async def _read_conversation(self, body: bytearray, about: str) -> ConversationDigests | None:
        """Return the digests of a body; None if it is no JSON object."""
        try:
            value, _ = await parse_body(body, self.reader.options)
        except ApiError:
            return None
        return ConversationDigests.from_body(value, about) if isinstance(value, Mapping) else None

    def _note(self, conversation: ConversationDigests, route: RouteKeys | None) -> None:
        if route is not None:
            self.known.note(conversation, route)

    def _read_later(
        self, conversation: ConversationDigests, read: Callable[[], Awaitable[RouteKeys | None]], size: int
    ) -> None:
        """Start to read a prompt on the thread, if not too many wait already. size: bytes of its body."""
        if self.waiting_bytes + size > self.most_bytes:
            return
        self.waiting_bytes += size
        loop = asyncio.get_running_loop()

        async def read_in_turn() -> RouteKeys | None:
            async with self._turn:
                return await read()

        def finish(done: Future[Any]) -> None:
            self.waiting_bytes -= size
            if not done.cancelled():
                self._note(conversation, done.result())

        self.thread.portal.start_task_soon(read_in_turn).add_done_callback(
            lambda done: loop.call_soon_threadsafe(finish, done)
        )
