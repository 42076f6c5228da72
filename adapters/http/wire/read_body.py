"""Read a request's body into JSON. Its size, time and depth are limited before anything is made of it."""

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
from adapters.http.wire.body_budget import CLOSE_HEADERS, FREE_BYTES, BodyBudget, IncomingBody, make_timeout_error
from adapters.http.wire.connection import ANNOUNCED
from adapters.http.wire.errors import ApiError, invalid
from adapters.http.wire.fields import Fields
from adapters.http.wire.json_cost import measure_json
from adapters.http.wire.repair_json import DEEP_NESTING, HALF_CHARACTER, flatten_deep_values, replace_surrogate_halves

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 17  # arrays and objects of a body: 30 MB of them at most, made in 50 ms
MAX_VALUES = 1 << 22  # of any kind; 150 MB if all are numbers
INLINE_BYTES = FREE_BYTES  # larger bodies are counted, then parsed in a worker thread, unless they are quick to parse
# A quick body: a prompt of 32,768 token ids, or the messages of a long conversation. Parsing one takes 1.4 ms, and
# 13 ms if all values are fractions. A thread holds the interpreter as long, and first waits for it while decode steps
# run.
QUICK_BYTES = 1 << 18
QUICK_VALUES = (1 << 15) + (1 << 10)
QUICK_CONTAINERS = 1 << 10
# Bytes. Of a larger body that is not JSON, only the offset is reported. The parser that says more holds the interpreter
# for as long as it takes: 25 ms for these, 0.2 s for 31 MiB of wide characters.
MAX_EXPLAINED_BYTES = 4 << 20
ENCODED_CHARACTERS = 1 << 20
MAX_REPAIRED_BYTES = 4 << 20  # bytes of a body in which nesting is repaired: its texts and brackets take 0.6 s at most
PARSERS = 1  # such bodies at a time: parsing holds the interpreter
UNCHECKED_TYPES = frozenset((int, bool))  # types of which every value is valid
BOM = b"\xef\xbb\xbf"
DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


@asynccontextmanager
async def read_request_fields(request: Request, options: EdgeOptions, budget: BodyBudget) -> AsyncIterator[Fields]:
    """Give the block the body as a JSON object. The body takes room in the budget until the block ends. Raises ApiError
    400, 408, 413, 415 or 503.
    """
    check_headers(request)
    with budget.open_body(options.times.body_timeout_s) as body:
        value, repairs = await parse_body(await read_bytes(request, options, budget, body), options)
        yield evolve(Fields.from_value(value, "$"), repairs=repairs)


async def parse_body(raw: bytearray, options: EdgeOptions) -> tuple[Any, tuple[str, ...]]:
    """Return the body's value, and the kinds of faults that were repaired in it."""
    if len(raw) < INLINE_BYTES or is_quick(raw):
        return parse_with_repair(raw, parse_json)
    large = partial(parse_large_json, options=options)
    return await anyio.to_thread.run_sync(parse_with_repair, raw, large, limiter=parser_limiter())


def is_quick(raw: bytearray) -> bool:
    """Is a body so quick to parse that a worker thread would only delay it? Marks in its texts count as well."""
    return (
        len(raw) < QUICK_BYTES
        and raw.count(b",") < QUICK_VALUES
        and raw.count(b"[") + raw.count(b"{") <= QUICK_CONTAINERS
    )


def parse_with_repair(raw: bytearray, parse: Callable[[bytes | bytearray], Any]) -> tuple[Any, tuple[str, ...]]:
    """Parse a body, and repair it where it is refused and can be repaired. Raises ApiError as `parse` does."""
    try:
        return parse(raw), ()
    except ApiError:
        repaired: bytes | bytearray = raw
        kinds = list[str]()
        if (whole := replace_surrogate_halves(repaired)) is not None:
            repaired = whole
            kinds.append(HALF_CHARACTER)
        if len(raw) <= MAX_REPAIRED_BYTES and (flat := flatten_deep_values(repaired, MAX_DEPTH)) is not None:
            repaired = flat
            kinds.append(DEEP_NESTING)
        if not kinds:
            raise
    return parse(repaired), tuple(kinds)


@cache
def parser_limiter() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(PARSERS)


def parse_large_json(raw: bytes | bytearray, options: EdgeOptions) -> Any:
    """Parse a body that would take much time and memory if it held millions of small values. Raises ApiError where it
    does.
    """
    most = min(MAX_VALUES, MAX_CONTAINERS + options.limits.max_prompts * options.model.max_ctx)
    for found in measure_json(raw):
        if found.depth > MAX_DEPTH:
            raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}")
        if found.containers > MAX_CONTAINERS:
            raise invalid("$", f"the body has more than {MAX_CONTAINERS} arrays and objects")
        if found.containers + found.commas > most:
            raise invalid("$", f"the body has more than {most} values")
    return parse_json(raw)


def check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"The body must be JSON: send `Content-Type: application/json`, not {kind[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type", headers=CLOSE_HEADERS)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"The body must not be compressed; Content-Encoding is {coding[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type", headers=CLOSE_HEADERS)


async def read_bytes(request: Request, options: EdgeOptions, budget: BodyBudget, body: IncomingBody) -> bytearray:
    too_large = ApiError(
        413,
        f"The body is larger than {options.limits.max_body} bytes (--max-body).",
        code="body_too_large",
        headers=CLOSE_HEADERS,
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > options.limits.max_body:
        raise too_large
    announced = request.scope.get(ANNOUNCED, int)
    raw = bytearray()
    try:
        with body.scope:
            async for part in receive_parts(request):
                if max(len(raw) + len(part), announced()) > options.limits.max_body:
                    raise too_large
                await budget.grow(body, len(part))
                raw += part
    except ClientDisconnect:
        raise ApiError(400, "The body was not sent completely.", headers=CLOSE_HEADERS) from None
    if body.scope.cancelled_caught:
        raise make_timeout_error(body, options.times.body_timeout_s)
    budget.finish(body)
    return raw


async def receive_parts(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of the body as `Request.stream` does, but also empty ones. An empty part means that bytes were
    announced, and none of them has arrived.
    """
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


def parse_json(raw: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8, with or without a byte order mark. If a key occurs twice, its last value counts. Raises
    ApiError.
    """
    try:
        value = DECODER.decode(memoryview(raw)[len(BOM) :] if raw.startswith(BOM) else raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if len(raw) > MAX_EXPLAINED_BYTES:
            raise invalid("$", f"the body is not JSON that can be read: {error}"[:200]) from None
        value = parse_for_error(raw)
    check_values(value)
    return value


def parse_for_error(raw: bytes | bytearray) -> Any:
    """Parse with the standard library what the quick parser refuses, to learn what is wrong and where. Raises
    ApiError.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid("$", f"the body is not UTF-8 (byte {error.start})") from None
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise invalid("$", f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # an integer of thousands of digits, NaN
        raise invalid("$", f"the body is not JSON that can be read: {error}"[:200]) from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def check_values(value: Any) -> None:
    """Refuse numbers beyond a double, lone surrogates and deep nesting. Raises ApiError with the path, which is made
    only then.
    """
    ways: list[Iterator[tuple[str | int, Any]]] = [iter([("$", value)])]
    path: list[str | int] = []  # the keys of the containers that are open
    while ways:
        for key, found in ways[-1]:
            if type(key) is str and (at := find_surrogate_half(key)) is not None:
                raise invalid(format_path(path), f"has half of a surrogate pair at character {at} of a key")
            if type(found) is str and (at := find_surrogate_half(found)) is not None:
                raise invalid(format_path([*path, key]), f"has half of a surrogate pair at character {at}")
            if type(found) is float and not math.isfinite(found):
                raise invalid(format_path([*path, key]), "the number is too large")
            if type(found) in (dict, list):
                if len(path) >= MAX_DEPTH:
                    raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}")
                if type(found) is list and UNCHECKED_TYPES.issuperset(map(type, found)):
                    continue  # a prompt of token ids: checking each of them would be useless
                path.append(key)
                ways.append(iter(found.items() if type(found) is dict else enumerate(found)))
                break
        else:
            ways.pop()
            if path:
                path.pop()


def find_surrogate_half(text: str) -> int | None:
    """Return the position of half of a surrogate pair, which no encoding has; None if there is none."""
    for start in range(0, 0 if text.isascii() else len(text), ENCODED_CHARACTERS):
        try:
            text[start : start + ENCODED_CHARACTERS].encode()
        except UnicodeEncodeError as error:
            return start + error.start
    return None


def format_path(path: list[str | int]) -> str:
    """Return a path as errors name it, such as `$.messages[2].content`."""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key[:80]}" for key in path[1:])
    return "".join((str(path[0]), *steps))
