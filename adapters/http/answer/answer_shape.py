"""The interface by which an API writes its answers, once a request is understood."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from adapters.http.answer.job_stream import AnswerDelta, FinishedChoice, PromptProgress
from adapters.http.wire.errors import ApiError


class AnswerShape(Protocol):
    """Writes one answer as one API has it. Streams are made of server-sent events, already encoded."""

    @property
    def id(self) -> str: ...

    def stream_opening(self) -> Iterable[bytes]: ...

    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]: ...

    def stream_progress(self, progress: PromptProgress, elapsed_ms: float) -> Iterable[bytes]: ...

    def stream_heartbeat(self) -> Iterable[bytes]:
        """Write a sign of life while nothing else is sent. It has a real event: some clients do not count comments as
        life.
        """
        ...

    def stream_choice_end(self, ended: FinishedChoice) -> Iterable[bytes]:
        """Write that one choice is complete."""
        ...

    def stream_closing(self, ended: Sequence[FinishedChoice]) -> Iterable[bytes]:
        """Write that all choices are complete."""
        ...

    def stream_error(self, error: ApiError) -> Iterable[bytes]:
        """Write an error in the middle of a stream. Nothing follows it."""
        ...

    def build_answer(self, said: Mapping[int, AnswerDelta], ended: Sequence[FinishedChoice]) -> Any:
        """Return the whole answer as one JSON value. said: all text of each choice, by its index."""
        ...


def make_id(prefix: str) -> str:
    """Return a new random id."""
    return prefix + secrets.token_hex(12)


def encode_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event. Unicode's line breaks are escaped, since some clients split lines at them."""
    encoded = ENCODER.encode(data)
    if not encoded.isascii():
        for mark, escaped in LINE_BREAKS:
            encoded = encoded.replace(mark, escaped)
    line = b"data: %b\n\n" % encoded
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)


ENCODER = msgspec.json.Encoder()
# Unicode's line breaks in UTF-8, and how JSON escapes them.
LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
