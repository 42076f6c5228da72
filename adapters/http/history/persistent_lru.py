"""Small things by name, within limits: in memory, and each in a file of one folder, which the next start reads.

Those that were used last are kept. Memory is what counts; a task writes what changes, so a kill may lose the last one,
and a full disk costs nothing but what a restart would have found. What is kept is bytes that say themselves whether
they are whole.
"""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar

import anyio
import msgspec
from attrs import define, field, frozen

from adapters.store.files.private_folder import TEMPORARY, Folder

log = logging.getLogger("rekindle.http")
DIGEST = 64  # letters of it
CLOSING_S = 0.5  # for what is not written yet
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what reading bytes of anybody's may raise


@frozen
class Limits:
    """How many there may be, their bytes in memory and as many on disk, and the bytes of one."""

    count: int
    size: int
    largest: int


@define(eq=False)
class PersistentLru(ABC):
    """folder: None, and all ends with the process."""

    folder: Folder | None = None
    _raw: OrderedDict[str, bytes] = field(factory=OrderedDict)  # those that were used longest ago first
    _bytes: int = 0
    damaged: int = field(default=0, init=False)  # files that were found so
    _changed: dict[str, None] = field(factory=dict)  # kept or dropped, and the folder has not followed
    _news: anyio.Event = field(factory=anyio.Event)
    _failing: bool = False

    what: ClassVar[str]  # it holds, in the log
    names: ClassVar[re.Pattern[str]]

    @property
    @abstractmethod
    def limits(self) -> Limits: ...

    @abstractmethod
    def is_whole(self, raw: bytes) -> bool:
        """Were these bytes, which a file holds, written here?"""

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self._bytes

    def put(self, name: str, body: bytes, *, lasting: bool = True) -> bool:
        """False: it is too large.  lasting: also in the folder."""
        if len(body) > self.limits.largest:
            return False
        self._put(name, signed(body))
        if lasting:
            self._change(name)
        while len(self._raw) > self.limits.count or self._bytes > self.limits.size:
            self.drop(next(iter(self._raw)))
        return True

    def find(self, name: str) -> bytes | None:
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

    def load(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """What an earlier process left there: the newest, as many as are kept. For a thread, before anything else.
        given_up: asked before each file. Raises OSError.
        """
        if self.folder is None:
            return
        written, limits = list[tuple[int, str, int]](), self.limits
        for name, about in self._owned.files():
            if self.names.fullmatch(name):
                written.append((about.st_mtime_ns, name, about.st_size))
            elif name.startswith(TEMPORARY):
                self._remove(name)
        for _, name, size in sorted(written, reverse=True):
            if given_up():
                return
            raw = self._read(name, min(size, DIGEST + limits.largest + 1))
            room = len(self._raw) < limits.count and self._bytes + len(raw) <= limits.size
            whole = self.is_whole(raw)
            self.damaged += not whole
            if room and whole:
                self._put(name, raw)
                self._raw.move_to_end(name, last=False)
            else:
                self._remove(name)

    async def run(self) -> None:
        """The folder follows, until this is cancelled."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            await self._follow()  # what is being written is, or whoever comes next would find it half done

    async def close(self, deadline: float = 0) -> None:
        """deadline: what is not written until then is given up, but a moment there always is."""
        if self.folder is not None:
            with anyio.CancelScope(deadline=max(deadline, anyio.current_time() + CLOSING_S), shield=True):
                await self._follow(giving_up=True)
            self.folder.close()

    async def _follow(self, *, giving_up: bool = False) -> None:
        """giving_up: where this is cancelled, a slow disk is waited for no longer."""
        while self._changed:
            name = next(iter(self._changed))
            raw = self._raw.get(name)
            try:
                if raw is not None:
                    work = partial(self._owned.write, name, [raw])
                    await anyio.to_thread.run_sync(work, abandon_on_cancel=giving_up)
                else:
                    await anyio.to_thread.run_sync(self._remove, name)
            except OSError as error:
                if not self._failing:
                    log.warning("%s cannot be written (%s); a restart will not find them", self.what, error)
                self._failing = True
            else:
                self._failing = False
            if self._raw.get(name) is raw:  # and not changed again meanwhile; a cancelled write is done by `close`
                self._changed.pop(name, None)  # `close` may have done it meanwhile

    @property
    def _owned(self) -> Folder:
        assert self.folder is not None
        return self.folder

    def _read(self, name: str, size: int) -> bytes:
        """Nothing, where that fails; of one that is longer, a byte more."""
        with suppress(OSError), open(self._owned.opener(name), "rb") as file:  # noqa: PTH123 - by descriptor
            return file.read(size + 1)
        return b""

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self._owned.remove(name)

    def _put(self, name: str, raw: bytes) -> None:
        self._bytes += len(raw) - len(self._raw.pop(name, b""))
        self._raw[name] = raw

    def _change(self, name: str) -> None:
        waiting = len(self._changed) < 2 * self.limits.count  # more, and the disk hangs: the next start tidies
        if self.folder is not None and waiting:
            self._changed[name] = None
            self._news.set()


def signed(body: bytes) -> bytes:
    """With its digest before it, on a line of its own: it shows damage, and is no signature against forgery."""
    return digest(body) + b"\n" + body


def is_signed(raw: bytes) -> bool:
    return raw[DIGEST : DIGEST + 1] == b"\n" and raw[:DIGEST] == digest(raw[DIGEST + 1 :])


def digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST // 2).hexdigest().encode()
