"""Encode errors as whole HTTP responses, for connections that no application answers."""

from __future__ import annotations

import json
from http import HTTPStatus

import h11

from adapters.http.wire.address import MAX_HEAD_BYTES

TOO_LONG = HTTPStatus.REQUEST_URI_TOO_LONG
TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
NOT_IMPLEMENTED = HTTPStatus.NOT_IMPLEMENTED  # h11's hint for a transfer coding that it does not know
HEAD_TOO_LARGE = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
TARGET_TOO_LONG = f"The request's target is longer than {MAX_HEAD_BYTES} bytes."


def encode_error(status: str, kind: str, code: str, message: str, *more: str) -> bytes:
    """Return a whole HTTP response that is an error, for a place where no application can be asked. more: further
    headers.
    """
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    lines = f"HTTP/1.1 {status}", "content-type: application/json", "connection: close", *more
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", body)).encode()


def make_refusal(message: str, error: BaseException | None, start: bytes | None) -> tuple[h11.Event, ...]:
    """Return the events of a response to what cannot be read as HTTP. message: said where nothing more is known.

    error: what h11 raised. start: the head as far as it has come; None: a head was read, and its body is wrong.
    """
    status = getattr(error, "error_status_hint", 400)
    code = "bad_http"
    if status == TOO_LARGE and start is not None:
        if b"\r\n" in start:
            code = "head_too_large"
            message = HEAD_TOO_LARGE
        else:
            status = TOO_LONG
            code = "target_too_long"
            message = TARGET_TOO_LONG
    elif status != NOT_IMPLEMENTED:
        status = 400
    described = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": described}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
    return (response, h11.Data(data=body), h11.EndOfMessage())
