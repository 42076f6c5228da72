"""Keep small records by name, within limits: in memory, and each in a file of one folder, which the next start loads.

The records that were used last are kept. Memory is authoritative, and a task writes changes to the folder. A kill may
therefore lose the last changes. A full disk costs nothing but what a restart would have found. Each record has a digest
that shows whether it is whole.
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

from adapters.store.files.private_folder import TEMPORARY, PrivateFolder

log = logging.getLogger("rekindle.http")
DIGEST_CHARACTERS = 64  # hexadecimal digits
CLOSING_S = 0.5  # seconds to write what is not written yet
# The errors of decoding bytes that anybody may have written.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@frozen
class Limits:
    """The number of records, their bytes in memory (and as many on disk), and the bytes of one record."""

    count: int
    size: int
    largest: int


@define(eq=False)
class PersistentLru(ABC):
    """A store of records. folder: None, and everything ends with the process."""

    folder: PrivateFolder | None = None
    _records: OrderedDict[str, bytes] = field(factory=OrderedDict)  # in the order of their last use, the oldest first
    _size: int = 0
    damaged_count: int = field(default=0, init=False)  # files that were damaged when they were loaded
    _unwritten: dict[str, None] = field(factory=dict)  # names that were put or removed, and are not written yet
    _change_event: anyio.Event = field(factory=anyio.Event)
    _is_failing: bool = False

    description: ClassVar[str]  # the records, as the log names them
    name_pattern: ClassVar[re.Pattern[str]]

    @property
    @abstractmethod
    def limits(self) -> Limits: ...

    @abstractmethod
    def is_whole(self, raw: bytes) -> bool:
        """Return whether the bytes of a file are a record that was written here."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return self._size

    def put(self, name: str, body: bytes, *, lasting: bool = True) -> bool:
        """Store a record. Return False if it is too large. lasting: also write it to the folder."""
        if len(body) > self.limits.largest:
            return False
        self._insert(name, add_digest(body))
        if lasting:
            self._note_change(name)
        while len(self._records) > self.limits.count or self._size > self.limits.size:
            self.remove(next(iter(self._records)))
        return True

    def find(self, name: str) -> bytes | None:
        return self._records.get(name)

    def mark_used(self, name: str) -> None:
        """Make this record the last one to be dropped."""
        self._records.move_to_end(name)

    def remove(self, name: str) -> bool:
        raw = self._records.pop(name, None)
        if raw is None:
            return False
        self._size -= len(raw)
        self._note_change(name)
        return True

    # -- the folder

    def open_folder(self, folder: PrivateFolder) -> None:
        """Use this folder from now on. Call `load` next."""
        self.folder = folder

    def abandon_folder(self) -> None:
        """Close the folder without writing to it. New records end with the process."""
        self._open_folder.close()
        self.folder = None

    def load(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Load the newest records of an earlier process, as many as are kept. Call it on a worker thread, before
        anything else.

        is_cancelled: called before each file. Raises OSError.
        """
        if self.folder is None:
            return
        written = list[tuple[int, str, int]]()
        limits = self.limits
        for name, about in self._open_folder.list_files():
            if self.name_pattern.fullmatch(name):
                written.append((about.st_mtime_ns, name, about.st_size))
            elif name.startswith(TEMPORARY):
                self._remove_file(name)
        for _, name, size in sorted(written, reverse=True):
            if is_cancelled():
                return
            raw = self._read_file(name, min(size, DIGEST_CHARACTERS + limits.largest + 1))
            room = len(self._records) < limits.count and self._size + len(raw) <= limits.size
            whole = self.is_whole(raw)
            self.damaged_count += not whole
            if room and whole:
                self._insert(name, raw)
                self._records.move_to_end(name, last=False)
            else:
                self._remove_file(name)

    async def run(self) -> None:
        """Write changes to the folder, until this is cancelled."""
        while True:
            await self._change_event.wait()
            self._change_event = anyio.Event()
            await self._write_changes()  # it writes a begun file to its end, or the next process would find half of it

    async def close(self, deadline: float = 0) -> None:
        """Write the last changes and close the folder. deadline: what is not written then is given up, but at least
        `CLOSING_S` is allowed.
        """
        if self.folder is not None:
            with anyio.CancelScope(deadline=max(deadline, anyio.current_time() + CLOSING_S), shield=True):
                await self._write_changes(giving_up=True)
            self.folder.close()

    async def _write_changes(self, *, giving_up: bool = False) -> None:
        """Write until there are no changes. giving_up: if this is cancelled, do not wait for a slow disk."""
        while self._unwritten:
            name = next(iter(self._unwritten))
            raw = self._records.get(name)
            try:
                if raw is not None:
                    work = partial(self._open_folder.write_file, name, [raw])
                    await anyio.to_thread.run_sync(work, abandon_on_cancel=giving_up)
                else:
                    await anyio.to_thread.run_sync(self._remove_file, name)
            except OSError as error:
                if not self._is_failing:
                    log.warning(
                        "%s cannot be written to disk (%s); they are lost at the next restart", self.description, error
                    )
                self._is_failing = True
            else:
                self._is_failing = False
            if self._records.get(name) is raw:  # it did not change again meanwhile; `close` repeats a cancelled write
                self._unwritten.pop(name, None)  # `close` may have done it meanwhile

    @property
    def _open_folder(self) -> PrivateFolder:
        assert self.folder is not None
        return self.folder

    def _read_file(self, name: str, size: int) -> bytes:
        """Return the bytes of a file, or nothing if that fails. A longer file gives one byte more than `size`."""
        with suppress(OSError), open(self._open_folder.open_existing(name), "rb") as file:  # noqa: PTH123 - by descriptor
            return file.read(size + 1)
        return b""

    def _remove_file(self, name: str) -> None:
        with suppress(OSError):
            self._open_folder.remove(name)

    def _insert(self, name: str, raw: bytes) -> None:
        self._size += len(raw) - len(self._records.pop(name, b""))
        self._records[name] = raw

    def _note_change(self, name: str) -> None:
        # With more, the disk hangs, and the next start tidies up.
        waiting = len(self._unwritten) < 2 * self.limits.count
        if self.folder is not None and waiting:
            self._unwritten[name] = None
            self._change_event.set()


def add_digest(body: bytes) -> bytes:
    """Return the body with its digest before it, on a line of its own. It shows damage, but is no signature against
    forgery.
    """
    return digest_body(body) + b"\n" + body


def has_valid_digest(raw: bytes) -> bool:
    return raw[DIGEST_CHARACTERS : DIGEST_CHARACTERS + 1] == b"\n" and raw[:DIGEST_CHARACTERS] == digest_body(
        raw[DIGEST_CHARACTERS + 1 :]
    )


def digest_body(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_CHARACTERS // 2).hexdigest().encode()
