"""Asks an OpenAI-compatible server for one answer and counts its tokens and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx2
from attrs import define, field, frozen

from engine.settings.output.formatting import format_count
from engine.settings.sse_client import Chunk, read_chunks
from engine.tools.chat.chat_options import ChatOptions

# There is no limit for the answer itself: Ctrl-C ends it.
CONNECT_S = 30.0


@define(eq=False)
class ChatAnswer:
    """The part of an answer that has come so far. Times are seconds of one clock."""

    sent: float = field(factory=time.perf_counter)
    text: str = ""
    first: float = 0.0
    last: float = 0.0
    events: int = 0
    prompt: int | None = None  # tokens, as the server counts
    tokens: int | None = None
    cached: int | None = None
    tier: str | None = None
    finish: str | None = None
    cancelled: bool = False

    def add_chunk(self, now: float, chunk: Chunk) -> None:
        for choice in chunk.choices:
            self.finish = choice.finish_reason or self.finish
            if choice.answer_text:
                self.events += 1
                self.first = self.first or now
                self.last = now
            if choice.delta is not None:
                self.text += choice.delta.content or ""
        if chunk.usage is not None:
            self.prompt = chunk.usage.prompt_tokens
            self.tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached = chunk.usage.prompt_tokens_details.cached_tokens
        if self.cached is None and chunk.timings is not None:
            self.cached = chunk.timings.cache_n
        if chunk.rekindle is not None:
            self.tier = chunk.rekindle.tier

    @property
    def line(self) -> str:
        """The cost of the answer in one line.

        A server that does not count tokens is assumed to send one with each event.
        """
        count = self.events if self.tokens is None else self.tokens
        parts = ["cancelled"] if self.cancelled else []
        parts.append(format_count(count, "token"))
        if count > 1 and self.last > self.first:
            parts.append(f"{(count - 1) / (self.last - self.first):.1f} tokens/s")
        if self.first:
            parts.append(f"first after {self.first - self.sent:.2f} s")
        if self.cached is not None:
            where = f" from {self.tier}" if self.tier and self.cached else ""
            of = f" of {self.prompt:,}" if self.prompt is not None else ""
            parts.append(f"{self.cached:,}{of} prompt tokens restored{where}")
        if self.finish == "length":
            parts.append("cut off at the token limit")
        return ", ".join(parts)


@frozen(eq=False)
class ChatPeer:
    """A server to talk to. model: the name that the server gives to its model."""

    base: str
    model: str
    key: str
    options: ChatOptions

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def build_body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = {"temperature": self.options.temperature, "max_tokens": self.options.max_tokens}
        return {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in chosen.items() if value is not None},
        }

    async def ask(self, messages: list[dict[str, Any]], answer: ChatAnswer, show: Callable[[str, str], None]) -> None:
        """Send the messages, and show thoughts and text of the answer as they come.

        Cancelling closes the connection, which ends the request. Raises StreamBroken, httpx2.HTTPError.
        """
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        # There may be a proxy on the way to a server that the user named, but never to ours.
        named = bool(self.options.url)
        async with (
            httpx2.AsyncClient(base_url=self.base, headers=self.headers, timeout=timeout, trust_env=named) as http,
            http.stream("POST", "/v1/chat/completions", json=self.build_body(messages)) as response,
            aclosing(read_chunks(response)) as coming,
        ):
            async for now, chunk in coming:
                answer.add_chunk(now, chunk)
                for choice in chunk.choices:
                    if choice.delta is not None:
                        show(choice.delta.thinking, choice.delta.content or "")
