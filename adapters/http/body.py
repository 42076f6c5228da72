"""Reading a request's body: bounded in size, time and depth, before anything is made of it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import anyio
from starlette.requests import ClientDisconnect, Request

from adapters.http.errors import ApiError, invalid
from adapters.http.fields import Fields
from adapters.http.options import EdgeOptions

MAX_DEPTH = 64
INLINE_BYTES = 1 << 16  # larger bodies are parsed in a worker thread
CLOSE = {"connection": "close"}  # the rest of the body is not read, so the connection cannot be used again


async def read_object(request: Request, options: EdgeOptions) -> Fields:
    """The body as a JSON object. Raises ApiError 400, 408, 413 or 415."""
    check_headers(request)
    raw = await read_bytes(request, options)
    value = parse(raw) if len(raw) < INLINE_BYTES else await anyio.to_thread.run_sync(parse, raw)
    return Fields.of(value, "$")


def check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"The body must be JSON: send `Content-Type: application/json`, not {kind[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type", headers=CLOSE)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"The body must not be compressed; Content-Encoding is {coding[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type", headers=CLOSE)


async def read_bytes(request: Request, options: EdgeOptions) -> bytes:
    too_large = ApiError(
        413, f"The body is larger than {options.max_body} bytes (--max-body).", code="body_too_large", headers=CLOSE
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > options.max_body:
        raise too_large
    raw = bytearray()
    try:
        with anyio.fail_after(options.body_timeout_s):
            async for part in request.stream():
                raw += part
                if len(raw) > options.max_body:
                    raise too_large
    except TimeoutError:
        message = f"The body did not arrive within {options.body_timeout_s:g} s."
        raise ApiError(408, message, code="body_timeout", headers=CLOSE) from None
    except ClientDisconnect:
        raise ApiError(400, "The body was not sent completely.", headers=CLOSE) from None
    return bytes(raw)


def parse(raw: bytes) -> Any:
    """JSON in UTF-8, a byte order mark allowed; of a key that occurs twice the last value holds."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid("$", f"the body is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise invalid("$", f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # an integer of thousands of digits, NaN
        raise invalid("$", f"the body is not JSON that can be read: {error}"[:200]) from None
    check(value)
    return value


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def check(value: Any) -> None:
    """No number beyond a double, no lone surrogate, no deep nesting. Raises ApiError with the path."""
    todo: list[tuple[Any, str, int]] = [(value, "$", 0)]
    while todo:
        found, path, depth = todo.pop()
        if isinstance(found, str):
            check_text(found, path)
        elif isinstance(found, float):
            if not math.isfinite(found):
                raise invalid(path, "the number is too large")
        elif isinstance(found, dict | list):
            if depth >= MAX_DEPTH:
                raise invalid("$", f"the body is nested deeper than {MAX_DEPTH}")
            if isinstance(found, dict):
                for key, inner in found.items():
                    check_text(key, path)
                    todo.append((inner, f"{path}.{key[:80]}", depth + 1))
            else:
                todo += [
                    (inner, f"{path}[{place}]", depth + 1)
                    for place, inner in enumerate(found)
                    if type(inner) is not int
                ]


def check_text(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid(path, f"has half of a surrogate pair at character {error.start}") from None
