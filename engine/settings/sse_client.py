"""An OpenAI-compatible answer as it is streamed: server-sent events, read with a limit, from any server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import httpx2
import msgspec

LONGEST_LINE = 1 << 20  # bytes of one event; ours take a few hundred
SHOWN = 100  # characters of what a server said


class Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None


class Timings(msgspec.Struct):
    """llama.cpp's."""

    cache_n: int | None = None


class RekindleFigures(msgspec.Struct):
    """Ours: where the tokens that were not computed again came from."""

    tier: str | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.thought or delta.tool_calls)))


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    rekindle: RekindleFigures | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(Chunk)


class Broken(Exception):
    """An answer that is none. One line."""


async def chunks(
    answer: httpx2.Response, clock: Callable[[], float] = time.perf_counter
) -> AsyncGenerator[tuple[float, Chunk]]:
    """Each event with when it came, in seconds of the clock, until the answer has ended. Raises Broken."""
    if answer.status_code != 200:
        raise Broken(f"HTTP {answer.status_code}: {complaint(parsed(await answer.aread()))}")
    rest, finished = b"", False
    async for piece in answer.aiter_bytes():
        now = clock()
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise Broken(f"an event of more than {LONGEST_LINE} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                finished = True
                continue
            chunk = decoded(data)
            finished = finished or any(choice.finish_reason for choice in chunk.choices)
            yield now, chunk
    if not finished:
        raise Broken("the stream ended before the answer did")


def decoded(data: bytes) -> Chunk:
    try:
        chunk = DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(f"an event that is none: {str(error)[:SHOWN]}") from error
    if chunk.error is not None:
        raise Broken(f"in the stream: {complaint(chunk.error)}")
    return chunk


def parsed(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return raw.decode(errors="replace")


def complaint(found: Any) -> str:
    """The message of an error object of any of the usual forms, or how what came begins."""
    for name in ("error", "message", "detail"):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
    return " ".join(str(found).split())[:SHOWN]


def said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN].removesuffix(": ")
