"""Sends one request over HTTP, streams its answer, and notes when each piece of it came.

Events of many streams come at once. If the clock were read for each event in turn, its time would be too late by the
handling of all events before it. So the clock here is the time at which the event loop's selector returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from selectors import DefaultSelector, SelectorKey
from typing import Any, Self

import httpx2
import msgspec
from attrs import define, field

from engine.settings.sse_client import Chunk, StreamBroken, Usage, describe_error, read_chunks
from engine.settings.user_error import UserError
from engine.tools.bench.answer_connection import AnswerConnection, AnswerConnections
from engine.tools.bench.bench_options import MeasuredServer, RequestOptions
from engine.tools.bench.bench_prompts import LoadPrompt


@define(eq=False)
class Sample:
    """The outcome of one request. Times are seconds of one clock. times: when each event with text came."""

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
        """The tokens of the answer. A server that does not count them is assumed to send one token with each event."""
        return len(self.times) if self.answer is None else self.answer


class TimestampSelector(DefaultSelector):
    """A selector that notes when data last came. at: that time, in seconds of `perf_counter`."""

    at = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready = super().select(timeout)
        self.at = time.perf_counter()
        return ready


@define(eq=False)
class LoadClient:
    """The client that sends all requests of a run.

    http: for what is not measured. connections: of the requests that are.
    """

    server: MeasuredServer
    requests: RequestOptions
    http: httpx2.AsyncClient
    connections: AnswerConnections
    model: str = ""

    @staticmethod
    def from_options(
        server: MeasuredServer, requests: RequestOptions, clock: Callable[[], float] = time.perf_counter
    ) -> LoadClient:
        """Return a client. clock: returns the time at which the data that is read now came."""
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        http = httpx2.AsyncClient(base_url=server.base, headers=headers, timeout=server.timeout, trust_env=False)
        connections = AnswerConnections(server.base, headers, server.timeout, clock)
        return LoadClient(server, requests, http, connections, server.model)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.connections.close()
        await self.http.aclose()

    async def find_model(self) -> None:
        """Return the model that the server has. Raises UserError if no server answers."""
        try:
            answer = await self.http.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"--url {self.server.url}: no server answers there ({describe_error(error)})") from error
        if answer.status_code in (401, 403):
            raise UserError(f"--url {self.server.url}: HTTP {answer.status_code}: --api-key is missing or wrong")
        if not self.model:
            try:
                self.model = str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(f"--url {self.server.url}: it lists no models; name one with --model") from error

    def build_body(self, prompt: LoadPrompt) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.answer,
            "temperature": self.requests.temperature,
        }
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.requests.more}
        if self.server.api == "chat":
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt.text}]}
        return "/v1/completions", {**body, "prompt": prompt.text if self.requests.words else list(prompt.tokens)}

    async def ask(self, prompt: LoadPrompt, sample: Sample) -> None:
        """Send a prompt and fill in the sample as the answer comes."""
        path, body = self.build_body(prompt)
        content = msgspec.json.encode(body)
        sample.sent = time.perf_counter()
        try:
            async with self.connections.post(path, content) as answer:
                await read_answer(answer, sample)
        except StreamBroken as error:
            sample.error = str(error)
        sample.ended = time.perf_counter()


async def read_answer(answer: AnswerConnection, sample: Sample) -> None:
    """Read server-sent events until the stream ends. Raises StreamBroken."""
    async with aclosing(read_chunks(answer, lambda: answer.arrived)) as coming:
        async for now, chunk in coming:
            add_event(chunk, now, sample)
    if not sample.times:
        raise StreamBroken("an answer without text")


def add_event(chunk: Chunk, now: float, sample: Sample) -> None:
    """Add an event that came at `now`."""
    if any(choice.answer_text for choice in chunk.choices):
        sample.times.append(now)
    if chunk.usage is not None:
        count_usage(chunk.usage, sample)
    if sample.cached is None and chunk.timings is not None:
        sample.cached = chunk.timings.cache_n


def count_usage(usage: Usage, sample: Sample) -> None:
    sample.prompt = usage.prompt_tokens
    sample.answer = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        sample.cached = usage.prompt_tokens_details.cached_tokens
