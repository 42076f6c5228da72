"""One folder of files that belong to Rekindle alone. It is private, it is opened without following links, and files are
written whole or not at all.

Every call uses the folder's own descriptor. If the path is removed or replaced by a link, calls fail or stay in the old
folder, and nothing is written elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from aiofiles.threadpool import wrap

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedIOBase

LOCK = "LOCK"
TEMPORARY = ".new-"
STRETCH_BYTES = 8 << 20  # content that one hop to the executor writes: 2 to 8 ms of copying into the page cache


class FolderUnusable(Exception):
    """The folder cannot be used. The message is one line that says why."""


class FolderInUse(FolderUnusable):
    """Another process uses the folder."""


class PrivateFolder:
    """A folder owned by one process at a time, from `open` to `close`. `open_read_only` does not own it."""

    def __init__(self, path: Path, descriptor: int, lock: int | None) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> PrivateFolder:
        """Open the folder, or create it, and take its lock. Raises FolderUnusable."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise FolderUnusable(f"{path}: {error.strerror}") from error
        try:
            check_private(path, os.fstat(descriptor))
            return cls(path, descriptor, lock_folder(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open_read_only(cls, path: Path) -> PrivateFolder:
        """Open an existing folder for reading only, whichever process owns it. Raises FolderUnusable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise FolderUnusable(f"{path}: {error.strerror}") from error
        return cls(path, descriptor, None)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a child process keeps open so that the folder stays locked until both have ended."""
        return () if self._lock is None else (self._lock,)

    def close(self) -> None:
        """Close the folder. Calling it again does nothing."""
        open_ones = [
            descriptor for descriptor in (self._lock, self._descriptor) if descriptor is not None and descriptor >= 0
        ]
        self._lock = None
        self._descriptor = -1
        for descriptor in open_ones:
            os.close(descriptor)

    def list_names(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of the regular files. A name may be anything."""
        return [(name, about.st_size) for name, about in self.list_files()]

    def list_files(self) -> list[tuple[str, os.stat_result]]:
        """Return the names of the regular files with all that the system knows of them."""
        with os.scandir(self._descriptor) as found:
            return [
                (entry.name, entry.stat(follow_symlinks=False))
                for entry in found
                if entry.is_file(follow_symlinks=False)
            ]

    @property
    def descriptor(self) -> int:
        """The folder itself, for calls that take paths relative to it; -1 once it is closed."""
        return self._descriptor

    def open_existing(self, name: str) -> int:
        """Open a file for reading, without ever blocking.

        Raises OSError; FileNotFoundError also if the name is not a file's.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except OSError as error:
            # The name is a link or a socket.
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise FileNotFoundError(errno.ENOENT, f"{name} is not a regular file") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, f"{name} is not a regular file")
        return descriptor

    def write_file(self, name: str, parts: Sequence[bytes]) -> int:
        """Write a whole file and return its bytes. Raises OSError.

        When this returns, the file has its name and survives a power cut. If it fails, the name has no file, or has the
        file that was there before.
        """
        temporary = TEMPORARY + name
        file = self._open_new(temporary)
        try:
            self.append(file, parts)
        except BaseException:
            self._shut_and_discard(file, temporary)
            raise
        self._publish(file, temporary, name)
        return sum(map(len, parts))

    async def write_async(self, name: str, parts: Sequence[bytes], executor: Executor) -> int:
        """Do the same through an aiofiles handle, with every system call on `executor`: for large files.

        A hop to a pool of one thread and back costs some 115 microseconds of processor time, to a `SameThreadExecutor`
        some 60. So the content is written in stretches of STRETCH_BYTES, and all that follows it is one hop.
        """
        loop = asyncio.get_running_loop()
        call = partial(loop.run_in_executor, executor)
        temporary = TEMPORARY + name
        file = await call(self._open_new, temporary)
        handle = wrap(file, loop=loop, executor=executor)
        try:
            for stretch in group_parts(parts):
                await self.append_async(handle, stretch)
        except BaseException:
            await call(self._shut_and_discard, file, temporary)
            raise
        await call(self._publish, file, temporary, name)
        return sum(map(len, parts))

    def _open_new(self, temporary: str) -> BufferedWriter:
        file = open(temporary, "wb", opener=self.create)  # noqa: SIM115 - `shut` closes it
        assert isinstance(file, BufferedWriter)
        return file

    def _publish(self, file: BufferedWriter, temporary: str, name: str) -> None:
        """Make what was written durable, then give it its name."""
        try:
            try:
                file.flush()
                self.sync(file.fileno())
            finally:
                self.shut(file)
            self.rename(temporary, name)
        except BaseException:
            self._discard(temporary)
            raise
        self.sync_folder()

    def _shut_and_discard(self, file: BufferedWriter, temporary: str) -> None:
        try:
            self.shut(file)
        finally:
            self._discard(temporary)

    def _discard(self, temporary: str) -> None:
        with suppress(OSError):
            self.remove(temporary)

    def extend_file(self, name: str, raw: bytes) -> None:
        """Append to a file that exists. A kill may leave a torn end. Raises OSError, FileNotFoundError."""
        file = open(name, "ab", opener=self.open_append)  # noqa: SIM115 - as above
        try:
            self.append(file, [raw])
        finally:
            self.shut(file)

    # --- one system call each, so that a test can make any of them fail ---

    def create(self, name: str, _: int = 0) -> int:
        """Create a new file, as an opener that chooses the flags itself."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._descriptor)

    def open_append(self, name: str, _: int = 0) -> int:
        """Open for appending, as an opener. A pipe of that name is an OSError: it would wait for a reader."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._descriptor)

    def append(self, file: BinaryIO, parts: Sequence[bytes]) -> None:
        """Write all parts. A buffered file continues where one write takes less than it is given."""
        file.writelines(parts)
        file.flush()

    async def append_async(self, file: AsyncBufferedIOBase, parts: Sequence[bytes]) -> None:
        """Append the parts in one call on the file's executor; its buffer may keep some of it until a flush."""
        await file.writelines(parts)

    def sync(self, descriptor: int) -> None:
        """Wait until the content of a file is on the disk."""
        os.fsync(descriptor)

    def shut(self, file: BinaryIO) -> None:
        """Close a file."""
        file.close()

    def rename(self, old: str, new: str) -> None:
        """Give a file of the folder another name. A file that has that name is replaced."""
        os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def sync_folder(self) -> None:
        """Wait until the names of the folder are on the disk."""
        os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file of the folder. Raises OSError."""
        os.unlink(name, dir_fd=self._descriptor)


def check_private(path: Path, about: os.stat_result) -> None:
    """Raise FolderUnusable if anybody else owns the folder or may write to it."""
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise FolderUnusable(f"{path}: others may write there; accepted: a folder of yours alone (0700)")


def lock_folder(path: Path, folder: int) -> int:
    """Lock the folder. The kernel releases the lock, however the process ends."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(LOCK, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise FolderUnusable(f"{path}/{LOCK}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise FolderInUse(f"{path}: another process is using this cache folder") from error
    return descriptor


def group_parts(parts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield the parts in order, in lists of at most STRETCH_BYTES, or of one part that is larger."""
    stretch = list[bytes]()
    size = 0
    for part in parts:
        if stretch and size + len(part) > STRETCH_BYTES:
            yield stretch
            stretch = []
            size = 0
        stretch.append(part)
        size += len(part)
    if stretch:
        yield stretch
