"""Reading a request's body: bounded in size, time and depth, before anything is made of it."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, NoReturn

import anyio
import msgspec
from attrs import evolve
from starlette.requests import ClientDisconnect, Request

from adapters.http.edge_options import EdgeOptions
from adapters.http.wire.body_budget import CLOSE, SMALL, Body, Intake, too_slow
from adapters.http.wire.connection import ANNOUNCED
from adapters.http.wire.errors import ApiError, invalid
from adapters.http.wire.fields import Fields
from adapters.http.wire.json_cost import censuses
from adapters.http.wire.repair_json import DEEP_NESTING, HALF_CHARACTER, without_depth, without_halves

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 17  # arrays and objects of a body: 30 MB of them at most, made in 50 ms
MAX_VALUES = 1 << 22  # of any kind; 150 MB if all are numbers
INLINE_BYTES = SMALL  # larger bodies are counted, then parsed in a worker thread
EXPLAINED = 4 << 20  # bytes: of a larger body that is not JSON only the place is told, as the parser that says more
# holds the interpreter for as long as it takes: 25 ms for these, 0.2 s for 31 MiB of wide characters
PART = 1 << 20  # characters
MOST_MENDED = 4 << 20  # bytes of a body in which nesting is repaired: its texts and brackets take 0.6 s at most
PARSERS = 1  # such bodies at a time: parsing holds the interpreter
WHOLE = frozenset((int, bool))  # kinds of which every value is right
BOM = b"\xef\xbb\xbf"
DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


@asynccontextmanager
async def reading(request: Request, options: EdgeOptions, intake: Intake) -> AsyncIterator[Fields]:
    """The body as a JSON object; it takes room in the intake meanwhile. Raises ApiError 400, 408, 413, 415 or 503."""
    check_headers(request)
    with intake.body(options.body_timeout_s) as body:
        value, mended = await parsed(await read_bytes(request, options, intake, body), options)
        yield evolve(Fields.of(value, "$"), mended=mended)


async def parsed(raw: bytearray, options: EdgeOptions) -> tuple[Any, tuple[str, ...]]:
    """Return the body's value, and what was repaired in it."""
    if len(raw) < INLINE_BYTES:
        return parse_mended(raw, parse)
    large = partial(parse_large, options=options)
    return await anyio.to_thread.run_sync(parse_mended, raw, large, limiter=parsers())


def parse_mended(raw: bytearray, parse: Callable[[bytes | bytearray], Any]) -> tuple[Any, tuple[str, ...]]:
    """Parse a body, and repair it where it is refused and can be repaired. Raises ApiError as `parse` does."""
    try:
        return parse(raw), ()
    except ApiError:
        mended: bytes | bytearray = raw
        kinds = list[str]()
        if (whole := without_halves(mended)) is not None:
            mended = whole
            kinds.append(HALF_CHARACTER)
        if len(raw) <= MOST_MENDED and (flat := without_depth(mended, MAX_DEPTH)) is not None:
            mended = flat
            kinds.append(DEEP_NESTING)
        if not kinds:
            raise
    return parse(mended), tuple(kinds)


@cache
def parsers() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(PARSERS)


def parse_large(raw: bytes | bytearray, options: EdgeOptions) -> Any:
    """As `parse`, for a body that would take much time and memory if it held millions of small values."""
    most = min(MAX_VALUES, MAX_CONTAINERS + options.max_prompts * options.max_ctx)
    for found in censuses(raw):
        if found.depth > MAX_DEPTH:
            raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}")
        if found.containers > MAX_CONTAINERS:
            raise invalid("$", f"the body has more than {MAX_CONTAINERS} arrays and objects")
        if found.containers + found.commas > most:
            raise invalid("$", f"the body has more than {most} values")
    return parse(raw)


def check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"The body must be JSON: send `Content-Type: application/json`, not {kind[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type", headers=CLOSE)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"The body must not be compressed; Content-Encoding is {coding[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type", headers=CLOSE)


async def read_bytes(request: Request, options: EdgeOptions, intake: Intake, body: Body) -> bytearray:
    too_large = ApiError(
        413, f"The body is larger than {options.max_body} bytes (--max-body).", code="body_too_large", headers=CLOSE
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > options.max_body:
        raise too_large
    announced = request.scope.get(ANNOUNCED, int)
    raw = bytearray()
    try:
        with body.scope:
            async for part in parts(request):
                if max(len(raw) + len(part), announced()) > options.max_body:
                    raise too_large
                await intake.grow(body, len(part))
                raw += part
    except ClientDisconnect:
        raise ApiError(400, "The body was not sent completely.", headers=CLOSE) from None
    if body.scope.cancelled_caught:
        raise too_slow(body, options.body_timeout_s)
    intake.arrived(body)
    return raw


async def parts(request: Request) -> AsyncIterator[bytes]:
    """As `Request.stream`, but empty parts are told, too: more was announced, and nothing of it has come."""
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


def parse(raw: bytes | bytearray) -> Any:
    """JSON in UTF-8, a byte order mark allowed; of a key that occurs twice the last value holds."""
    try:
        value = DECODER.decode(memoryview(raw)[len(BOM) :] if raw.startswith(BOM) else raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if len(raw) > EXPLAINED:
            raise invalid("$", f"the body is not JSON that can be read: {error}"[:200]) from None
        value = parse_again(raw)
    check(value)
    return value


def parse_again(raw: bytes | bytearray) -> Any:
    """What the quick parser will not have: read by the standard library's, which says what is wrong, and where."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid("$", f"the body is not UTF-8 (byte {error.start})") from None
    try:
        return json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise invalid("$", f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # an integer of thousands of digits, NaN
        raise invalid("$", f"the body is not JSON that can be read: {error}"[:200]) from None


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def check(value: Any) -> None:
    """No number beyond a double, no lone surrogate, no deep nesting. Raises ApiError with the path, made only then."""
    ways: list[Iterator[tuple[str | int, Any]]] = [iter([("$", value)])]
    path: list[str | int] = []  # the keys of the containers that are open
    while ways:
        for key, found in ways[-1]:
            if type(key) is str and (at := half(key)) is not None:
                raise invalid(written(path), f"has half of a surrogate pair at character {at} of a key")
            if type(found) is str and (at := half(found)) is not None:
                raise invalid(written([*path, key]), f"has half of a surrogate pair at character {at}")
            if type(found) is float and not math.isfinite(found):
                raise invalid(written([*path, key]), "the number is too large")
            if type(found) in (dict, list):
                if len(path) >= MAX_DEPTH:
                    raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}")
                if type(found) is list and WHOLE.issuperset(map(type, found)):
                    continue  # a prompt of token ids: each of them would be looked at for nothing
                path.append(key)
                ways.append(iter(found.items() if type(found) is dict else enumerate(found)))
                break
        else:
            ways.pop()
            if path:
                path.pop()


def half(text: str) -> int | None:
    """Where half of a surrogate pair stands, which no encoding has."""
    for start in range(0, 0 if text.isascii() else len(text), PART):
        try:
            text[start : start + PART].encode()
        except UnicodeEncodeError as error:
            return start + error.start
    return None


def written(path: list[str | int]) -> str:
    """$.messages[2].content"""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key[:80]}" for key in path[1:])
    return "".join((str(path[0]), *steps))
