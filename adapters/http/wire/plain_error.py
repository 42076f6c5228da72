"""Encode errors as whole HTTP responses, for connections that no application answers."""

from __future__ import annotations

import json

import h11


def encode_error(status: str, kind: str, code: str, message: str, *more: str) -> bytes:
    """Return a whole HTTP response that is an error, for a place where no application can be asked. more: further
    headers.
    """
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    lines = f"HTTP/1.1 {status}", "content-type: application/json", "connection: close", *more
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", body)).encode()


def make_bad_request(message: str) -> tuple[h11.Event, ...]:
    """Return the events of a response to what is not HTTP."""
    described = {"message": message, "type": "invalid_request_error", "param": None, "code": "bad_http"}
    body = json.dumps({"error": described}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
    return (response, h11.Data(data=body), h11.EndOfMessage())
