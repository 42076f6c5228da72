"""Tells events that carry a token from those that do not, in the streams of all APIs.

The ingress may send a request to another replica as long as its client has no token. So it has to know which events
of a stream only say that an answer has begun, or that the server is alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

END = b"\n\n"  # of an event, as our servers write it
LOST_TYPES = frozenset({"unavailable_error", "overloaded_error"})  # of errors that another replica need not have
OPENING_TYPES = frozenset({"response.created", "response.in_progress", "message_start", "ping"})


class EventKind(Enum):
    """The meaning of an event of a stream for a request that may have to be sent again."""

    OPENING = "it begins the answer"
    IDLE = "it is a sign of life"
    LOST = "it is an error that another replica need not have"
    TOKEN = "it is a part of the answer, or its end"  # noqa: S105 - no password


def classify_event(event: bytes) -> EventKind:
    """Return what one event means. An event of an unknown form counts as a token."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return EventKind.IDLE
    try:
        data = msgspec.json.decode(lines[0].removeprefix(b"data:"))
    except msgspec.DecodeError:
        return EventKind.TOKEN  # `[DONE]`
    return classify_data(data) if isinstance(data, dict) else EventKind.TOKEN


def classify_data(data: Mapping[str, Any]) -> EventKind:
    """Return what the data of an event means."""
    if isinstance(error := data.get("error"), dict):
        return EventKind.LOST if error.get("type") in LOST_TYPES else EventKind.TOKEN
    if data.get("type") in OPENING_TYPES:
        return EventKind.OPENING
    if isinstance(choices := data.get("choices"), list) and data.get("usage") is None:
        kinds = {classify_choice(choice) for choice in choices}
        return next((kind for kind in (EventKind.TOKEN, EventKind.OPENING) if kind in kinds), EventKind.IDLE)
    if data.get("content") == "" and data.get("stop") is False:
        return EventKind.IDLE
    return EventKind.TOKEN


def classify_choice(choice: Mapping[str, Any]) -> EventKind:
    """Return what one choice of a chunk means, of chats and of completions."""
    if choice.get("finish_reason") is not None or choice.get("text"):
        return EventKind.TOKEN
    delta = choice.get("delta") or {}
    if any(value for name, value in delta.items() if name != "role"):
        return EventKind.TOKEN
    return EventKind.OPENING if "role" in delta else EventKind.IDLE
