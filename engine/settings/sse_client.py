"""Reads a streamed answer of any OpenAI-compatible server: server-sent events with a limit on their length."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import msgspec

LONGEST_LINE = 1 << 20  # bytes of one event; ours take a few hundred
SHOWN = 100  # characters of a server's error that are shown


class Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None


class Timings(msgspec.Struct):
    """Timings as llama.cpp sends them."""

    cache_n: int | None = None


class RekindleFigures(msgspec.Struct):
    """Figures that only Rekindle sends: which tier the restored tokens came from."""

    tier: str | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def thinking(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def answer_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.thinking or delta.tool_calls)))


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    rekindle: RekindleFigures | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(Chunk)


class StreamBroken(Exception):
    """The answer is not what a server should send. The message is one line."""


class StreamedAnswer(Protocol):
    """An answer over HTTP, as `httpx2.Response` is one."""

    @property
    def status_code(self) -> int: ...

    def aiter_bytes(self) -> AsyncIterator[bytes]: ...

    async def aread(self) -> bytes: ...


async def read_chunks(
    answer: StreamedAnswer, clock: Callable[[], float] = time.perf_counter
) -> AsyncGenerator[tuple[float, Chunk]]:
    """Yield each event with the time when it came, in seconds of the clock, until the answer ends.
    Raises StreamBroken.
    """
    if answer.status_code != 200:
        raise StreamBroken(f"HTTP {answer.status_code}: {describe_complaint(parse_json(await answer.aread()))}")
    rest = b""
    finished = False
    async for piece in answer.aiter_bytes():
        now = clock()
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise StreamBroken(f"an event of more than {LONGEST_LINE} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                finished = True
                continue
            chunk = decode_chunk(data)
            finished = finished or any(choice.finish_reason for choice in chunk.choices)
            yield now, chunk
    if not finished:
        raise StreamBroken("the stream ended before the answer did")


def decode_chunk(data: bytes) -> Chunk:
    try:
        chunk = DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StreamBroken(f"an event that is none: {str(error)[:SHOWN]}") from error
    if chunk.error is not None:
        raise StreamBroken(f"in the stream: {describe_complaint(chunk.error)}")
    return chunk


def parse_json(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return raw.decode(errors="replace")


def describe_complaint(found: Any) -> str:
    """Return the message of an error object of any usual form, or how the answer begins."""
    for name in ("error", "message", "detail"):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
    return " ".join(str(found).split())[:SHOWN]


def describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN].removesuffix(": ")
