"""What tells one API from another once a request is understood: how its answer looks.

Every API for generating text is a reader (body -> plan) and a Shape; running the jobs, streaming, keep-alives,
disconnects and deadlines are the same for all of them (`answer.py`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from adapters.http.errors import ApiError
from adapters.http.run import Ended, Progress, Said


class Shape(Protocol):
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

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> dict[str, Any]:
        """The same answer as one object. `said`: everything that a choice said, by index."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """The body of an answer that never began."""
        ...


@define(eq=False)
class Named:
    """What every OpenAI object carries."""

    id: str
    model: str
    created: int = field(factory=lambda: int(time.time()))
    fingerprint: str = "fp_rekindle"

    def head(self, kind: str) -> dict[str, Any]:
        named = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**named, "system_fingerprint": self.fingerprint}


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    line = f"data: {ENCODER.encode(data)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
