"""One request over HTTP: sent, streamed, and every piece of its answer timed as it comes.

Events of many streams come at once, and handling one takes 0.1 ms: what is timed by a clock that is looked at in its
turn is late by all that came with it. So the clock here is the event loop's ear.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from selectors import DefaultSelector, SelectorKey
from typing import Any

import httpx2
import msgspec
from attrs import define, field

from engine.settings.sse_client import Broken, Chunk, Usage, chunks, said
from engine.settings.user_error import UserError
from engine.tools.bench.bench_options import Load
from engine.tools.bench.bench_prompts import LoadPrompt

OPEN_ENDED = httpx2.Limits(max_connections=None, max_keepalive_connections=None)  # as many as there are streams


@define(eq=False)
class Sample:
    """What became of one request. Times are seconds of one clock; `times`: when each event with text came."""

    sent: float
    times: list[float] = field(factory=list[float])
    ended: float = 0.0
    prompt: int | None = None  # tokens, as the server counts
    answer: int | None = None
    cached: int | None = None
    error: str = ""

    @property
    def first(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def tokens(self) -> int:
        """A server that does not say is taken to send one with each event."""
        return len(self.times) if self.answer is None else self.answer


class Ear(DefaultSelector):
    """At which an event loop hears of what has come. at: when it last did, in seconds of `perf_counter`."""

    at = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready = super().select(timeout)
        self.at = time.perf_counter()
        return ready


@define(eq=False)
class LoadClient:
    """All requests of a run go through it. clock: says when what is read now has come."""

    load: Load
    http: httpx2.AsyncClient
    model: str = ""
    clock: Callable[[], float] = time.perf_counter

    @staticmethod
    def of(load: Load) -> LoadClient:
        headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
        http = httpx2.AsyncClient(
            base_url=load.base, headers=headers, timeout=load.timeout, limits=OPEN_ENDED, trust_env=False
        )
        return LoadClient(load, http, load.model)

    async def meet(self) -> None:
        """Is anybody there, and which model is served? Raises Refusal."""
        try:
            answer = await self.http.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"--url {self.load.url}: nobody answers there ({said(error)})") from error
        if answer.status_code in (401, 403):
            raise UserError(f"--url {self.load.url}: HTTP {answer.status_code}: --api-key is missing or wrong")
        if not self.model:
            try:
                self.model = str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(f"--url {self.load.url}: it lists no models; name one with --model") from error

    def body(self, prompt: LoadPrompt) -> tuple[str, dict[str, Any]]:
        load = self.load
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.answer, "temperature": load.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **load.more}
        if load.api == "chat":
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt.text}]}
        return "/v1/completions", {**body, "prompt": prompt.text if load.words else list(prompt.tokens)}

    async def ask(self, prompt: LoadPrompt, sample: Sample) -> None:
        """Fills the sample in as the answer comes."""
        path, body = self.body(prompt)
        content = msgspec.json.encode(body)
        sample.sent = time.perf_counter()
        try:
            headers = {"Content-Type": "application/json"}
            async with self.http.stream("POST", path, content=content, headers=headers) as answer:
                await read(answer, sample, self.clock)
        except Broken as error:
            sample.error = str(error)
        except httpx2.HTTPError as error:
            sample.error = said(error)
        sample.ended = time.perf_counter()


async def read(answer: httpx2.Response, sample: Sample, clock: Callable[[], float]) -> None:
    """Server-sent events, until the stream ends. Raises Broken."""
    async with aclosing(chunks(answer, clock)) as coming:
        async for now, chunk in coming:
            take(chunk, now, sample)
    if not sample.times:
        raise Broken("an answer without text")


def take(chunk: Chunk, now: float, sample: Sample) -> None:
    """One event, which came at `now`."""
    if any(choice.says for choice in chunk.choices):
        sample.times.append(now)
    if chunk.usage is not None:
        count(chunk.usage, sample)
    if sample.cached is None and chunk.timings is not None:
        sample.cached = chunk.timings.cache_n


def count(usage: Usage, sample: Sample) -> None:
    sample.prompt, sample.answer = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        sample.cached = usage.prompt_tokens_details.cached_tokens
