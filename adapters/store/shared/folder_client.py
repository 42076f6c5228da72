"""A client of a folder that several servers mount.

The library lists such a folder, as any store. Runs are read and written here, by threads of our own. A run is read
straight to its place, or piece by piece into memory that is used again and again, and decoded while it is in the
processor's cache. The library reads it whole into new memory first, and a core takes as long to map that as to copy the
bytes.

A folder may hang when its server is gone. A caller waits within its limit only, and the thread is left behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import unquote, urlsplit

from attrs import define, field

from adapters.daemon_executor import DaemonExecutor
from adapters.store.files.read_run import RunContent, borrow_scratch, read_fully
from adapters.store.files.seekable import Buffer, Damaged
from adapters.store.shared.borrowed_parts import BorrowedParts
from adapters.store.shared.object_client import ObjectClient, ObjectExists, StoreUnreachable, shorten_error
from adapters.store.shared.store_health import compute_limit, compute_patient_limit
from adapters.store.shared.thread_calls import start_call

THREADS = 64  # reads and writes at once; most wait for the folder
PARTS_AT_ONCE = 512  # of a file, in one call of the system; Linux takes 1,024
CLEARLY_TEMPORARY = "#"  # with a number behind it: listings of the library leave such files out
T = TypeVar("T")


@define(eq=False)
class FolderClient(ObjectClient):
    """The client. Its threads are started as they are needed, and end with `close` or with the process."""

    writes_borrowed_parts: ClassVar[bool] = True
    _threads: DaemonExecutor = field(factory=lambda: DaemonExecutor("shared-folder", THREADS), init=False)
    _root: Path = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._root = Path(unquote(urlsplit(self.url).path))

    async def read_content(
        self,
        name: str,
        size: int,
        workers: Executor,  # noqa: ARG002 - a thread that may hang is none of theirs
        decode: Callable[[RunContent], T],
        then: Callable[[T], object],
    ) -> T:
        """Do as any client does. After the limit, `then` is not called any more."""
        claim = threading.Lock()

        def read() -> T:
            with open_file(f"{self._root}/{name}") as file:
                found = decode(file)
            if not claim.acquire(blocking=False):
                raise StoreUnreachable("the caller has not waited for it")
            then(found)
            return found

        return await self._run(read, compute_limit(size), claim)

    async def write_object(self, name: str, parts: Sequence[Buffer], *, replace: bool = False) -> None:
        """Write an object; it is there as a whole or not at all. Raises ObjectExists unless it may be replaced."""
        limit_s = compute_patient_limit(sum(map(len, parts)))

        def write() -> None:
            try:
                write_file(f"{self._root}/{name}", parts, replace=replace)
            finally:
                if isinstance(parts, BorrowedParts):
                    parts.give_back()

        await self._run(write, limit_s, threading.Lock())

    def close(self) -> None:
        self._threads.shutdown()

    async def _run(self, work: Callable[[], T], limit_s: float, claim: threading.Lock) -> T:
        """Return what a call on a thread returns. Raises StoreUnreachable after the limit.

        claim: taken by the first of two that end the call: its thread, if the result counts, or this caller after the
        limit.
        """
        answer = start_call(self._threads, work)

        def expire() -> None:
            if not answer.done() and claim.acquire(blocking=False):
                answer.set_exception(StoreUnreachable(f"no answer within {limit_s:.1f} s from {self.place}"))

        timer = asyncio.get_running_loop().call_later(limit_s, expire)
        try:
            return await answer
        finally:
            timer.cancel()


@define(eq=False)
class FolderFile:
    """A file of the folder, as `fill_target` reads it."""

    descriptor: int
    size: int

    @contextmanager
    def read_piece(self, at: int, length: int) -> Iterator[memoryview]:
        """Yield a piece of the content. Raises Damaged if there is less, StoreUnreachable if reading fails."""
        with borrow_scratch(length) as space:
            with expect_folder():
                read_fully(self.descriptor, space[:length], at, length)
            yield space[:length]


@contextmanager
def open_file(path: str) -> Iterator[FolderFile]:
    """Open a file for as long as the block takes. Raises FileNotFoundError, StoreUnreachable or Damaged."""
    with expect_folder():
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name would wait for its writer
    try:
        with expect_folder():
            facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged("it is no file")
        yield FolderFile(descriptor, facts.st_size)
    finally:
        os.close(descriptor)


def write_file(path: str, parts: Sequence[Buffer], *, replace: bool) -> None:
    """Write a file under another name, and give it its own when it is whole. Raises ObjectExists, StoreUnreachable."""
    temporary = f"{path}{CLEARLY_TEMPORARY}{secrets.randbits(63)}"
    try:
        try:
            write_parts(temporary, parts)
        except FileNotFoundError:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_parts(temporary, parts)
        try:
            (os.rename if replace else os.link)(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError as error:
        raise ObjectExists from error
    except OSError as error:
        raise StoreUnreachable(shorten_error(error)) from error


def write_parts(path: str, parts: Sequence[Buffer]) -> None:
    """Write a new file. Raises OSError; what was written is removed then."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            for first in range(0, len(parts), PARTS_AT_ONCE):
                write_fully(descriptor, parts[first : first + PARTS_AT_ONCE])
        finally:
            os.close(descriptor)
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise


def write_fully(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Write parts to the end of a file. A call may write fewer bytes than it was given."""
    left = deque(parts)
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = memoryview(left[0])[written:]


@contextmanager
def expect_folder() -> Iterator[None]:
    """Turn errors of the system into ours. That a file is not there stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnreachable(shorten_error(error)) from error
