"""What tells one API from another once a request is understood: how its answer looks."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from adapters.http.answer.job_stream import Ended, Progress, Said
from adapters.http.wire.errors import ApiError


class AnswerShape(Protocol):
    """One answer in one API. Streams are made of server-sent events, already written out."""

    @property
    def id(self) -> str: ...

    def opening(self) -> Iterable[bytes]: ...

    def said(self, said: Said) -> Iterable[bytes]: ...

    def progress(self, progress: Progress, elapsed_ms: float) -> Iterable[bytes]: ...

    def heartbeat(self) -> Iterable[bytes]:
        """A sign of life while nothing else is sent. Real events: some clients do not count comments as life."""
        ...

    def ended(self, ended: Ended) -> Iterable[bytes]:
        """One choice is complete."""
        ...

    def closing(self, ended: Sequence[Ended]) -> Iterable[bytes]:
        """All are."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """In the middle of a stream; nothing follows it."""
        ...

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> Any:
        """The same answer as one value of JSON. `said`: everything that a choice said, by index."""
        ...


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event, a line to whoever reads lines as Unicode has them, too."""
    encoded = ENCODER.encode(data)
    if not encoded.isascii():
        for mark, escaped in BREAKS:
            encoded = encoded.replace(mark, escaped)
    line = b"data: %b\n\n" % encoded
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)


ENCODER = msgspec.json.Encoder()
BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))  # of lines, in UTF-8
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
