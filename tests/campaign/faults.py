"""A disk that fails now and then, and that forgets at a power cut what was not synced. It lies under the store, in its
folder.

As in SQLite's and TigerBeetle's tests, any call may fail, writes may be torn, and reads may be short. At a cut
everything that happened since the last fsync is there, or not, or in part, in any order: contents by the sector, names
one by one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import RLock
from typing import BinaryIO

from aiofiles.threadpool.binary import AsyncBufferedIOBase
from attrs import define, field, frozen

from adapters.store.disk.file_names import classify_name
from adapters.store.files.private_folder import PrivateFolder

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EROFS)
SECTOR = 512


@define(eq=False)
class Content:
    """The content of one file, which is only ever appended to. synced: bytes that a power cut leaves. lost: a sync
    failed.
    """

    raw: bytearray = field(factory=bytearray)
    synced: int = 0
    lost: bool = False

    def after_cut(self, random: Random) -> bytes:
        left = self.raw[: random.choice((self.synced, len(self.raw), random.randint(self.synced, len(self.raw))))]
        for at in range(self.synced, len(left), SECTOR):
            if random.random() < 0.3:
                stop = min(at + SECTOR, len(left))
                left[at:stop] = bytes(stop - at)
        return bytes(left)


@frozen(eq=False)
class Change:
    """A change of the folder's names: `name` means this content from now on. gone: another name that is removed at the
    same instant.
    """

    name: str
    content: Content | None
    gone: str = ""


@frozen
class Image:
    """The folder after a power cut. promised: names of files that were durable by then."""

    files: dict[str, bytes]
    promised: frozenset[str]

    def unpack(self, path: Path) -> Path:
        path.mkdir(mode=0o700)
        for name, raw in self.files.items():
            (path / name).write_bytes(raw)
        return path


class Unreliable(PrivateFolder):
    """rate: of calls that fail. cut_at: the call at which the power goes; everything goes on, to be forgotten.

    The writer's thread and readers call at once, and the power goes at one instant: `at_once` guards what is noted.
    """

    random: Random
    rate: float = 0
    cut_at: int = 0
    image: Image | None = None

    @classmethod
    def opened(cls, random: Random, rate: float, cut_at: int) -> Callable[[Path], Unreliable]:
        def make(path: Path) -> Unreliable:
            found = cls.open(path)
            assert isinstance(found, Unreliable)
            found.random, found.cut_at, found.at_once = random, cut_at, RLock()
            found.calls, found.failed_runs, found.promised, found.changes, found.writing = 0, 0, set(), [], {}
            found.now = {name: content_of(path / name) for name, _ in found.list_names()}
            found.durable, found.rate = dict(found.now), rate
            return found

        return make

    at_once: RLock
    calls: int
    failed_runs: int  # writes of runs that were said to have failed
    promised: set[str]
    now: dict[str, Content]
    durable: dict[str, Content]
    changes: list[Change]  # since the folder was last synced
    writing: dict[int, Content]  # by descriptor

    def point(self) -> None:
        with self.at_once:
            self.calls += 1
            if self.calls == self.cut_at:
                self.image = self.left()

    def may_fail(self) -> None:
        self.point()
        if self.random.random() < self.rate:
            number = self.random.choice(ERRORS)
            raise OSError(number, os.strerror(number))

    def cut(self) -> Image:
        with self.at_once:
            return self.left()

    def left(self) -> Image:
        names, likely = dict(self.durable), self.random.choice((0.0, 0.5, 0.9, 1.0))
        for change in self.changes:
            if self.random.random() < likely:
                changed(names, change)
        files = {name: content.after_cut(self.random) for name, content in names.items() if name != "LOCK"}
        return Image(files, frozenset(self.promised))

    def change(self, change: Change) -> None:
        with self.at_once:
            changed(self.now, change)
            self.changes.append(change)

    # --- as the folder does it ---

    def write_file(self, name: str, parts: Sequence[bytes]) -> int:
        try:
            count = super().write_file(name, parts)
        except OSError:
            self.failed_runs += classify_name(name) == "run"
            raise
        with self.at_once:
            self.promised.add(name)
        return count

    async def write_async(self, name: str, parts: Sequence[bytes], executor: Executor) -> int:
        try:
            count = await super().write_async(name, parts, executor)
        except OSError:
            self.failed_runs += classify_name(name) == "run"
            raise
        with self.at_once:
            self.promised.add(name)
        return count

    def create(self, name: str, _: int = 0) -> int:
        self.may_fail()
        descriptor = super().create(name)
        self.writing[descriptor] = Content()
        self.change(Change(name, self.writing[descriptor]))
        return descriptor

    def open_append(self, name: str, _: int = 0) -> int:
        self.may_fail()
        descriptor = super().open_append(name)
        self.writing[descriptor] = self.now.get(name) or Content()
        if name not in self.now:
            self.change(Change(name, self.writing[descriptor]))
        return descriptor

    def append(self, file: BinaryIO, parts: Sequence[bytes]) -> None:
        content = self.writing[file.fileno()]
        for part in parts:
            torn = self.random.randrange(len(part) + 1)
            super().append(file, [part[:torn]])
            content.raw += part[:torn]
            self.may_fail()
            super().append(file, [part[torn:]])
            content.raw += part[torn:]

    async def append_async(self, file: AsyncBufferedIOBase, parts: Sequence[bytes]) -> None:
        content = self.writing[file.fileno()]
        for part in parts:
            torn = self.random.randrange(len(part) + 1)
            await super().append_async(file, [part[:torn]])
            await file.flush()
            content.raw += part[:torn]
            self.may_fail()
            await super().append_async(file, [part[torn:]])
            await file.flush()
            content.raw += part[torn:]

    def sync(self, descriptor: int) -> None:
        content = self.writing[descriptor]
        try:
            self.may_fail()
        except OSError:
            content.lost = True  # the kernel tells once, and forgets what it could not write
            raise
        super().sync(descriptor)
        if not content.lost:
            content.synced = len(content.raw)

    def shut(self, file: BinaryIO) -> None:
        del self.writing[file.fileno()]
        super().shut(file)
        self.may_fail()

    def rename(self, old: str, new: str) -> None:
        with self.at_once:
            self.may_fail()
            super().rename(old, new)
            self.promised.discard(old)
            self.change(Change(new, self.now[old], gone=old))

    def sync_folder(self) -> None:
        with self.at_once:
            self.may_fail()
            super().sync_folder()
            self.durable, self.changes = dict(self.now), []

    def remove(self, name: str) -> None:
        with self.at_once:
            self.promised.discard(name)
            self.may_fail()
            super().remove(name)
            self.change(Change(name, None))

    def open_existing(self, name: str) -> int:
        self.may_fail()
        return super().open_existing(name)


def content_of(file: Path) -> Content:
    raw = bytearray(file.read_bytes())
    return Content(raw, len(raw))


def changed(names: dict[str, Content], change: Change) -> None:
    names.pop(change.gone, None)
    if change.content is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.content


@contextmanager
def short_reads(random: Random, rate: float) -> Iterator[None]:
    """Reads give less than they were asked for, as they may; or fail."""
    real = os.preadv

    def read(descriptor: int, views: Sequence[memoryview], at: int, *flags: int) -> int:
        if random.random() < rate / 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if len(views) == 1 and len(views[0]) > 1 and random.random() < rate:
            return real(descriptor, [memoryview(views[0])[: random.randint(1, len(views[0]))]], at)
        return real(descriptor, views, at, *flags)

    os.preadv = read
    try:
        yield
    finally:
        os.preadv = real
