"""A client of a folder that several servers mount.

The library lists such a folder, as any store. Runs are read and written here, by threads of our own. A stored run is
read straight to its place, and written from there (`stored_file.py`). Another one is read piece by piece into memory
that is used again and again, and decoded while it is in the processor's cache. The library reads it whole into new
memory first, and a core takes as long to map that as to copy the bytes.

A folder may hang when its server is gone. A caller waits within its limit only, and the thread is left behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from attrs import define, field

from adapters.daemon_executor import DaemonExecutor
from adapters.store.files.read_run import RunContent, borrow_scratch, read_fully
from adapters.store.files.seekable import Damaged
from adapters.store.shared.call_limit import CallLimit
from adapters.store.shared.object_client import Folder, ObjectClient, ObjectExists, StoreUnreachable, shorten_error
from adapters.store.shared.store_health import compute_limit, compute_patient_limit
from adapters.store.shared.thread_calls import start_call

THREADS = 64  # reads and writes at once; most wait for the folder
CLEARLY_TEMPORARY = "#"  # with a number behind it: listings of the library leave such files out
T = TypeVar("T")


@define(eq=False)
class FolderClient(ObjectClient):
    """The client. Its threads are started as they are needed, and end with `close` or with the process."""

    _threads: DaemonExecutor = field(factory=lambda: DaemonExecutor("shared-folder", THREADS), init=False)
    _root: Path = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._root = Path(unquote(urlsplit(self.url).path))

    @property
    def folder(self) -> Folder:
        """This client."""
        return self

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
        path = f"{self._root}/{name}"

        def read() -> T:
            file = FolderFile(path)
            try:
                found = decode(file)
            finally:
                file.close()
            take_claim(claim)
            then(found)
            return found

        return await self._run(read, compute_limit(size), claim)

    async def read_files(self, read: Callable[[Callable[[str], str], CallLimit], T]) -> T:
        """Read files as `Folder` describes it."""
        limit = CallLimit()
        answer = start_call(self._threads, partial(read, self._locate, limit))
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            if answer.done():
                return
            if (left_s := limit.compute_time_left()) > 0:
                timer = loop.call_later(left_s, look)
            else:
                answer.set_exception(StoreUnreachable(f"no answer within {limit.limit_s:.1f} s from {self.place}"))

        timer = loop.call_later(limit.limit_s, look)
        try:
            return await answer
        finally:
            timer.cancel()

    def _locate(self, name: str) -> str:
        return f"{self._root}/{name}"

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        """Write an object; it is there as a whole or not at all. Raises ObjectExists unless it may be replaced."""
        await self.write_file(name, sum(map(len, parts)), partial(write_file, parts=parts, replace=replace))

    async def write_file(self, name: str, size: int, write: Callable[[str, str], T]) -> T:
        """Write a file as `Folder` describes it."""
        work = partial(write_to_folder, f"{self._root}/{name}", write)
        return await self._run(work, compute_patient_limit(size), threading.Lock())

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
    """A file of the folder, as `fill_target` reads it. It is opened when something of it is read in Python.

    Everything raises FileNotFoundError, StoreUnreachable or Damaged. One thread asks for `size` before others read.
    """

    path: str
    _descriptor: int = -1
    _size: int = 0

    @property
    def size(self) -> int:
        self._open()
        return self._size

    @property
    def descriptor(self) -> int:
        self._open()
        return self._descriptor

    @contextmanager
    def read_piece(self, at: int, length: int) -> Iterator[memoryview]:
        """Yield a piece of the content. Raises Damaged if there is less, StoreUnreachable if reading fails."""
        with borrow_scratch(length) as space:
            with expect_folder():
                read_fully(self.descriptor, space[:length], at, length)
            yield space[:length]

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        with expect_folder():
            # A pipe of that name would wait for its writer.
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged("it is no file")
        self._size = facts.st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def take_claim(claim: threading.Lock) -> None:
    """Let the result of a call count. Raises StoreUnreachable if its caller has given up."""
    if not claim.acquire(blocking=False):
        raise StoreUnreachable("the caller has not waited for it")


def write_to_folder(path: str, write: Callable[[str, str], T]) -> T:
    """Write a file under another name first. Raises ObjectExists, StoreUnreachable."""
    temporary = f"{path}{CLEARLY_TEMPORARY}{secrets.randbits(63)}"
    try:
        try:
            return write(temporary, path)
        except FileNotFoundError:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return write(temporary, path)
    except FileExistsError as error:
        raise ObjectExists from error
    except OSError as error:
        raise StoreUnreachable(shorten_error(error)) from error


def write_file(temporary: str, path: str, parts: Sequence[bytes], *, replace: bool) -> None:
    """Write a file, and give it its name when it is whole. Raises OSError; then nothing is left."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
        (os.rename if replace else os.link)(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextmanager
def expect_folder() -> Iterator[None]:
    """Turn errors of the system into ours. That a file is not there stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnreachable(shorten_error(error)) from error
