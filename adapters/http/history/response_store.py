"""Keep responses that later requests may ask for or continue: in memory, and in a folder of the cache for the next
start.

A file has the digest of the rest, a line with its owner and the name of the response that it continues, and two lines
of JSON. These are the response as its client got it, and the input items that it answered. What is read back is parsed
like a request's body, within the same limits, and the items pass the same reader. So a forged file cannot say anything
that a client could not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, frozen

from adapters.http.edge_options import EdgeOptions
from adapters.http.history.persistent_lru import DIGEST_CHARACTERS, Limits, PersistentLru, has_valid_digest
from adapters.http.wire.errors import ApiError
from adapters.http.wire.read_body import parse_large_json

MAX_RESPONSES = 4096  # responses, each in a file
MAX_BYTES = 64 << 20  # in memory, and as much on disk: 1,600 turns of an agent that sends 40 KB each
MAX_RESPONSE_BYTES = 16 << 20  # bytes of one response: a quarter of all
MAX_CONVERSATION = 1024  # responses of one conversation
LINE_BREAKS = 3  # line breaks of a whole file; its last line has none
ENCODER = msgspec.json.Encoder()


@frozen
class StoredResponse:
    """A response, and the items that its request brought. The items are a list, or already encoded in one that is to be
    stored.
    """

    response: Mapping[str, Any]
    items: Any

    @property
    def previous(self) -> str | None:
        name = self.response.get("previous_response_id")
        return name if isinstance(name, str) else None

    @property
    def output(self) -> Sequence[Any]:
        output = self.response.get("output")
        return output if isinstance(output, list) else []


@define(eq=False)
class ResponseStore(PersistentLru):
    """The responses of all callers."""

    description = "responses"
    name_pattern = re.compile(r"resp_[0-9a-f]{24}")

    @property
    def limits(self) -> Limits:
        return Limits(MAX_RESPONSES, MAX_BYTES, MAX_RESPONSE_BYTES)

    def is_whole(self, raw: bytes) -> bool:
        return is_whole_response(raw)

    def store(self, name: str, owner: str, kept: StoredResponse) -> bool:
        """Store a response. Return False if it is too large."""
        whose = f"{owner} {kept.previous or ''}".encode()
        return self.put(name, b"\n".join((whose, ENCODER.encode(kept.response), ENCODER.encode(kept.items))))


@frozen
class ResponseFolder:
    """The responses of one caller. No other caller finds them, whatever ids it knows.

    owner: without white space; for a caller with a key, a digest of it.
    """

    responses: ResponseStore
    owner: str = ""

    def store(self, name: str, kept: StoredResponse) -> bool:
        return self.responses.store(name, self.owner, kept)

    def find(self, name: str) -> bytes | None:
        raw = self.responses.find(name)
        return raw if raw is not None and decode_header(raw)[0] == self.owner else None

    def remove(self, name: str) -> bool:
        return self.find(name) is not None and self.responses.remove(name)

    def find_conversation(self, name: str, most: int) -> list[bytes] | None:
        """Return a response and all before it, the oldest first. Return None if one of them is gone.

        most: bytes of all. Raises OverflowError beyond it.
        """
        found: dict[str, bytes] = {}
        while name and name not in found:
            raw = self.find(name)
            if raw is None:
                return None
            found[name] = raw
            most -= len(raw)
            if len(found) > MAX_CONVERSATION or most < 0:
                raise OverflowError
            _, name = decode_header(raw)
        for response_id in found:  # the newest is dropped first: without the older ones it would be worth nothing
            self.responses.mark_used(response_id)
        return [*found.values()][::-1]


def is_whole_response(raw: bytes) -> bool:
    return raw.count(b"\n") == LINE_BREAKS and has_valid_digest(raw)


def decode_header(raw: bytes) -> tuple[str, str]:
    """Return the owner of a response, and the name of the response that it continues, if any."""
    owner, _, previous = (
        raw[DIGEST_CHARACTERS + 1 : raw.index(b"\n", DIGEST_CHARACTERS + 1)].decode("ascii", "replace").partition(" ")
    )
    return owner, previous


def decode_response(raw: bytes, options: EdgeOptions) -> StoredResponse:
    """Return the response in a file. Raises ValueError for bytes that were never written here. This takes time: call it
    on a worker thread.
    """
    try:
        response, items = (parse_large_json(bytearray(line), options) for line in raw.split(b"\n", 3)[2:])
    except ApiError as error:
        raise ValueError(error.message) from error
    if not isinstance(response, dict) or not isinstance(items, list):
        raise ValueError("it is no response")  # noqa: TRY004 - of a file
    return StoredResponse(response, items)
