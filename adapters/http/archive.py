"""Responses that later requests may ask for or continue: in memory, and in a folder of the cache for the next start.

A file has the digest of what follows it, a line with whose it is and the name of the response that it continues, and
two lines of JSON: the response as its client got it, and the input items that it answered. What is read back is parsed
like a request's body, within the same limits, and the items pass the same reader: a file that somebody else wrote can
say nothing that a client could not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import msgspec
from attrs import define, field, frozen

from adapters.http.body import parse_large
from adapters.http.errors import ApiError
from adapters.http.options import EdgeOptions
from adapters.store.folder import TEMPORARY, Folder

log = logging.getLogger("rekindle.http")
NAME = re.compile(r"resp_[0-9a-f]{24}")
MOST = 4096  # responses, each in a file
MOST_BYTES = 64 << 20  # in memory, and as much on disk: 1,600 turns of an agent that sends 40 KB each
LARGEST = 16 << 20  # bytes of one: a quarter
MOST_TURNS = 1024  # responses of one conversation
DIGEST = 64  # letters of it
LINES = 3  # and a last one that is not ended
ENCODER = msgspec.json.Encoder()
CLOSING_S = 0.5  # for what is not written yet


@frozen
class ArchivedResponse:
    """A response, and the items that its request brought."""

    response: Mapping[str, Any]
    items: Sequence[Any]

    @property
    def previous(self) -> str | None:
        name = self.response.get("previous_response_id")
        return name if isinstance(name, str) else None

    @property
    def output(self) -> Sequence[Any]:
        output = self.response.get("output")
        return output if isinstance(output, list) else []


@define(eq=False)
class Archive:
    """Those that were used last are kept. folder: None, and they end with the process.

    Memory is what counts; a task writes what changes, so a kill may lose the last response, and a full disk costs
    nothing but what a restart would have found.
    """

    folder: Folder | None = None
    _raw: OrderedDict[str, bytes] = field(factory=OrderedDict)  # those that were used longest ago first
    _bytes: int = 0
    _changed: dict[str, None] = field(factory=dict)  # kept or dropped, and the folder has not followed
    _news: anyio.Event = field(factory=anyio.Event)
    _failing: bool = False

    def __len__(self) -> int:
        return len(self._raw)

    def keep(self, name: str, owner: str, kept: ArchivedResponse) -> bool:
        """False: it is too large."""
        whose = f"{owner} {kept.previous or ''}".encode()
        body = b"\n".join((whose, ENCODER.encode(kept.response), ENCODER.encode(kept.items)))
        if len(body) > LARGEST:
            return False
        self._put(name, digest(body) + b"\n" + body)
        self._change(name)
        while len(self._raw) > MOST or self._bytes > MOST_BYTES:
            self.drop(next(iter(self._raw)))
        return True

    def find(self, name: str) -> bytes | None:
        """For `read`."""
        return self._raw.get(name)

    def used(self, name: str) -> None:
        """It is let go of later than all others."""
        self._raw.move_to_end(name)

    def drop(self, name: str) -> bool:
        raw = self._raw.pop(name, None)
        if raw is None:
            return False
        self._bytes -= len(raw)
        self._change(name)
        return True

    # -- the folder

    def load(self) -> None:
        """What an earlier process left there: the newest, as many as are kept. For a thread, before anything else."""
        if self.folder is None:
            return
        written: list[tuple[int, str]] = []
        for name, _ in self._owned.names():
            if NAME.fullmatch(name):
                written.append((self._written(name), name))
            elif name.startswith(TEMPORARY):
                self._remove(name)
        for _, name in sorted(written, reverse=True):
            raw = self._read(name)
            if raw and is_whole(raw) and len(self._raw) < MOST and self._bytes + len(raw) <= MOST_BYTES:
                self._put(name, raw)
                self._raw.move_to_end(name, last=False)
            else:
                self._remove(name)

    async def run(self) -> None:
        """The folder follows, until this is cancelled."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            await self._follow()

    async def close(self, deadline: float = 0) -> None:
        """deadline: what is not written until then is given up, but a moment there always is."""
        if self.folder is not None:
            with anyio.CancelScope(deadline=max(deadline, anyio.current_time() + CLOSING_S), shield=True):
                await self._follow()
            self.folder.close()

    async def _follow(self) -> None:
        while self._changed:
            name = next(iter(self._changed))
            raw = self._raw.get(name)
            try:
                if raw is not None:
                    await self._owned.write(name, [raw])
                else:
                    await anyio.to_thread.run_sync(self._remove, name)
            except OSError as error:
                if not self._failing:
                    log.warning("responses cannot be written (%s); a restart will not find them", error)
                self._failing = True
            else:
                self._failing = False
            if self._raw.get(name) is raw:  # and not changed again meanwhile; a cancelled write is done by `close`
                del self._changed[name]

    @property
    def _owned(self) -> Folder:
        assert self.folder is not None
        return self.folder

    def _written(self, name: str) -> int:
        """When, in nanoseconds; 0 for what cannot be opened."""
        with suppress(OSError), open(self._owned.opener(name), "rb") as file:  # noqa: PTH123 - by descriptor
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def _read(self, name: str) -> bytes:
        """Nothing, where that fails."""
        with suppress(OSError), open(self._owned.opener(name), "rb") as file:  # noqa: PTH123 - by descriptor
            return file.read(DIGEST + LARGEST + 2)
        return b""

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self._owned.remove(name)

    def _put(self, name: str, raw: bytes) -> None:
        self._bytes += len(raw) - len(self._raw.pop(name, b""))
        self._raw[name] = raw

    def _change(self, name: str) -> None:
        if self.folder is not None and len(self._changed) < 2 * MOST:  # more, and the disk hangs: the next start tidies
            self._changed[name] = None
            self._news.set()


@frozen
class Shelf:
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


def digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST // 2).hexdigest().encode()


def is_whole(raw: bytes) -> bool:
    return raw.count(b"\n") == LINES and raw[DIGEST : DIGEST + 1] == b"\n" and raw[:DIGEST] == digest(raw[DIGEST + 1 :])


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
