"""A client of a folder that several servers mount.

The library lists such a folder, as any store. Runs are read and written here, by threads of our own: a run is read
straight to its place, or piece by piece into memory that is used again and again, and decoded in the cache. The library
reads it whole into new memory first, and a core takes as long to map that as to copy the bytes.

A folder may hang when its server is gone. A caller waits within its limit only, and the thread is left behind.
"""

from __future__ import annotations

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

from adapters.store.files.read_run import RunContent, borrow_scratch, read_fully
from adapters.store.files.seekable import Damaged
from adapters.store.shared.object_client import ObjectClient, ObjectExists, StoreUnreachable, shorten_error
from adapters.store.shared.store_health import compute_patient_limit

CLEARLY_TEMPORARY = "#"  # with a number behind it: listings of the library leave such files out
T = TypeVar("T")


@define(eq=False)
class FolderClient(ObjectClient):
    """The client."""

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
        """Do as any client does, and leave a thread behind that has not read it within the limit."""
        return await self._decode_on_thread(partial(open_file, self._root / name), size, decode, then)

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        """Write an object; it is there as a whole or not at all. Raises ObjectExists unless it may be replaced."""
        write = partial(write_file, self._root / name, parts, replace=replace)
        await self._run(write, compute_patient_limit(sum(map(len, parts))), threading.Lock())


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
def open_file(path: Path) -> Iterator[FolderFile]:
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


def write_file(path: Path, parts: Sequence[bytes], *, replace: bool) -> None:
    """Write a file under another name, and give it its own when it is whole. Raises ObjectExists, StoreUnreachable."""
    temporary = path.with_name(f"{path.name}{CLEARLY_TEMPORARY}{secrets.randbits(63)}")
    try:
        try:
            write_parts(temporary, parts)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_parts(temporary, parts)
        try:
            if replace:
                temporary.rename(path)
            else:
                path.hardlink_to(temporary)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ObjectExists from error
    except OSError as error:
        raise StoreUnreachable(shorten_error(error)) from error


def write_parts(path: Path, parts: Sequence[bytes]) -> None:
    """Write a new file. Raises OSError; what was written is removed then."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def expect_folder() -> Iterator[None]:
    """Turn errors of the system into ours. That a file is not there stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnreachable(shorten_error(error)) from error
