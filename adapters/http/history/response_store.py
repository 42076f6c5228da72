"""Responses that later requests may ask for or continue: in memory, and in a folder of the cache for the next start.

A file has the digest of what follows it, a line with whose it is and the name of the response that it continues, and
two lines of JSON: the response as its client got it, and the input items that it answered. What is read back is parsed
like a request's body, within the same limits, and the items pass the same reader: a file that somebody else wrote can
say nothing that a client could not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, frozen

from adapters.http.edge_options import EdgeOptions
from adapters.http.history.persistent_lru import DIGEST, Limits, PersistentLru, is_signed
from adapters.http.wire.errors import ApiError
from adapters.http.wire.read_body import parse_large

MOST = 4096  # responses, each in a file
MOST_BYTES = 64 << 20  # in memory, and as much on disk: 1,600 turns of an agent that sends 40 KB each
LARGEST = 16 << 20  # bytes of one: a quarter
MOST_TURNS = 1024  # responses of one conversation
LINES = 3  # and a last one that is not ended
ENCODER = msgspec.json.Encoder()


@frozen
class ArchivedResponse:
    """A response, and the items that its request brought: a list; of one that is to be kept, written out already."""

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
class Archive(PersistentLru):
    """Of responses."""

    what = "responses"
    names = re.compile(r"resp_[0-9a-f]{24}")

    @property
    def limits(self) -> Limits:
        return Limits(MOST, MOST_BYTES, LARGEST)

    def is_whole(self, raw: bytes) -> bool:
        return is_whole(raw)

    def keep(self, name: str, owner: str, kept: ArchivedResponse) -> bool:
        """False: it is too large."""
        whose = f"{owner} {kept.previous or ''}".encode()
        return self.put(name, b"\n".join((whose, ENCODER.encode(kept.response), ENCODER.encode(kept.items))))


@frozen
class ResponseFolder:
    """What of it one caller has put there. Nobody else finds that, whatever ids they know.

    owner: without white space; of callers with a key, a digest of it.
    """

    archive: Archive
    owner: str = ""

    def keep(self, name: str, kept: ArchivedResponse) -> bool:
        return self.archive.keep(name, self.owner, kept)

    def find(self, name: str) -> bytes | None:
        raw = self.archive.find(name)
        return raw if raw is not None and whose(raw)[0] == self.owner else None

    def drop(self, name: str) -> bool:
        return self.find(name) is not None and self.archive.drop(name)

    def conversation(self, name: str, most: int) -> list[bytes] | None:
        """It and all before it, the oldest first; None where one of them is gone.

        most: bytes of all. Raises OverflowError.
        """
        found: dict[str, bytes] = {}
        while name and name not in found:
            raw = self.find(name)
            if raw is None:
                return None
            found[name] = raw
            most -= len(raw)
            if len(found) > MOST_TURNS or most < 0:
                raise OverflowError
            _, name = whose(raw)
        for one in found:  # the newest is let go of first: without the older ones it would be worth nothing
            self.archive.used(one)
        return [*found.values()][::-1]


def is_whole(raw: bytes) -> bool:
    return raw.count(b"\n") == LINES and is_signed(raw)


def whose(raw: bytes) -> tuple[str, str]:
    """Its owner, and the name of the response that this one continues, or nothing."""
    owner, _, previous = raw[DIGEST + 1 : raw.index(b"\n", DIGEST + 1)].decode("ascii", "replace").partition(" ")
    return owner, previous


def read(raw: bytes, options: EdgeOptions) -> ArchivedResponse:
    """Raises ValueError for what was never written here. Takes its time."""
    try:
        response, items = (parse_large(bytearray(line), options) for line in raw.split(b"\n", 3)[2:])
    except ApiError as error:
        raise ValueError(error.message) from error
    if not isinstance(response, dict) or not isinstance(items, list):
        raise ValueError("it is no response")  # noqa: TRY004 - of a file
    return ArchivedResponse(response, items)
