"""Reads a run's file: pieces of it are read and decoded side by side, each into its part of the result.

What is read is bounded by the size that the run must have.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

from attrs import frozen

from adapters.store.files import seekable
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import (
    FRAME,
    MAX_HEAD_BYTES,
    check_frames,
    digest_sums,
    encode_around_digest,
    encode_head,
    split_frames,
)
from adapters.store.files.plain_frames import SHORT, read_plain_frames
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.seekable import Damaged, Sizes

PIECE_BYTES = (2 << 20) + (64 << 10)  # bytes that are read at once: a frame that did not get smaller, and the head
PAGE = 4096  # direct reads begin and end at its multiples
CACHED_SHARE = 0.5  # of a file's pages
LIBC = ctypes.CDLL(None)
_free_scratch = deque[mmap.mmap]()  # mappings that are not in use


class RunContent(Protocol):
    """The content of a run's file, wherever it lies. Several threads read pieces of it at once."""

    @property
    def size(self) -> int: ...

    def read_piece(self, at: int, length: int) -> AbstractContextManager[memoryview]:
        """Yield a piece of the content. Raises Damaged if there is less, OSError if reading fails."""
        ...

    @property
    def descriptor(self) -> int | None:
        """A file from which frames may be read straight to their places; None where there is none."""
        ...

    @property
    def path(self) -> str:
        """The file's path; empty where it is not to be opened again."""
        ...


class RunFile(io.FileIO):
    """A run's file, which is read once and whole. aiofiles wraps it: opening is one hop to a thread, `readinto`
    another.

    Pages in the page cache are read from there. Other pages are read past the cache: finding a place in it for every
    page takes more processor time than everything else that is done with the content.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        name: str,
        expected: Expected,
        pool: Executor,
        *,
        then: Callable[[], object] = lambda: None,
        past_cache: bool = False,
    ) -> None:
        """Open the file. Raises OSError.

        pool: its threads help reading. then: called on the reading thread when all contents are in place. past_cache:
        the page cache is not read either, if the file system can do that.
        """
        super().__init__(name, opener=lambda name, _: folder.open_existing(name))
        self._expected = expected
        self._pool = pool
        self._then = then
        try:
            self.size = os.fstat(self.fileno()).st_size
            self.direct = (past_cache or not is_cached(self.fileno(), self.size)) and enable_direct_reads(self.fileno())
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fileno(), 0, self.size, os.POSIX_FADV_WILLNEED)
        except BaseException:
            self.close()
            raise

    def readinto(self, buffer: object) -> int:
        """Fill the target with the run's tensors, end to end (as `Layout.get_specs` orders them), and close the file.

        Raises Damaged if the file is not exactly the one that we would write for this run, OSError if reading fails.
        """
        target = cast("memoryview", buffer)
        try:
            fill_target(self, self._expected, self._pool, target)
        finally:
            self.close()
        self._then()
        return len(target)

    @contextmanager
    def read_piece(self, at: int, length: int) -> Iterator[memoryview]:
        """Yield a piece of the file's content.

        Of a direct file whole pages are read. Raises Damaged if it is too short.
        """
        first = at % PAGE if self.direct else 0
        with borrow_scratch(first + length) as space:
            read_fully(self.fileno(), space if self.direct else space[:length], at - first, first + length)
            yield space[first : first + length]

    @property
    def descriptor(self) -> int | None:
        """The file, unless whole pages have to be read of it."""
        return None if self.direct else self.fileno()

    @property
    def path(self) -> str:
        """Nothing: the folder opens its files itself."""
        return ""


def fill_target(content: RunContent, expected: Expected, pool: Executor | None, target: memoryview) -> None:
    """Fill the target with the run's tensors.

    pool: its threads help reading. None: this thread reads alone, where others are kept busy by other runs.

    Raises Damaged if the content is not exactly what we would write for this run, OSError if reading fails.
    """
    if content.size != expected.size:
        raise Damaged("the file has another size than when it was written")
    frames = read_table(content, 1 + len(split_frames(len(target))))
    check_frames(frames, len(target))
    read = read_batches(content, group_frames(frames), pool, target)
    head = encode_head(expected.run, expected.layout, digest_sums(batch.sums for batch in read))
    if read[0].head != head:
        before, after = encode_around_digest(expected.run, expected.layout)
        is_ours = read[0].head.startswith(before) and read[0].head.endswith(after)
        own = "these are not the rows that the head was written for"
        raise Damaged(own if is_ours else "the file holds another run, or another model's")


def read_batches(
    content: RunContent, batches: Sequence[FrameBatch], pool: Executor | None, target: memoryview
) -> list[BatchResult]:
    """Read batches into the target and return their results in order. Raises Damaged or OSError."""
    if pool is None:
        return [read_batch(content, batch, target) for batch in batches]
    own, *others = batches
    futures = [pool.submit(read_batch, content, batch, target) for batch in others]
    try:
        read = [read_batch(content, own, target)]
    except (Damaged, OSError):
        for future in futures:
            future.cancel()
        raise
    finally:
        # After this no thread writes into the target or reads the content.
        wait(futures)
    return read + [future.result() for future in futures]


@frozen
class FrameBatch:
    """Neighbouring frames of a file. at: where the first one begins in the file.

    content: where its content begins in the tensors; below 0 for the head, which lies before them.
    """

    at: int
    frames: tuple[Sizes, ...]
    content: int

    @property
    def compressed_bytes(self) -> int:
        return sum(packed for packed, _ in self.frames)


def is_cached(descriptor: int, size: int) -> bool:
    """Return True if most of the file is in the page cache. The question itself does not load it."""
    if not size or not hasattr(LIBC, "mincore"):
        return True
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    try:
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
            pages = np.zeros(-(-size // PAGE), np.uint8)
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            failed = LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    except (OSError, BufferError):
        return True
    return bool(failed) or int((pages & 1).sum()) > CACHED_SHARE * len(pages)


def enable_direct_reads(descriptor: int) -> bool:
    """Let reads bypass the page cache. Return False if the file system cannot do that, as those in memory."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


@frozen
class BatchResult:
    """The result of reading one batch, without the contents.

    sums: of the blocks of its tensors, end to end. head: the header, if the batch begins with it.
    """

    sums: bytes
    head: bytes = b""


def read_table(file: RunContent, frames: int) -> list[Sizes]:
    """Return the sizes of all frames, from the table at the end of the file. Raises Damaged or OSError."""
    length = seekable.compute_table_size(frames)
    if length > file.size:
        raise Damaged("the file is too short")
    with file.read_piece(file.size - length, length) as raw:
        return seekable.parse_table(raw, file.size)


def read_batch(file: RunContent, batch: FrameBatch, target: memoryview) -> BatchResult:
    """Read neighbouring frames, and decompress their tensors into `target`. Raises Damaged or OSError."""
    if (found := read_plain_batch(file, batch, target)) is not None:
        return found
    at = batch.content
    head = b""
    sums = list[bytes]()
    with file.read_piece(batch.at, batch.compressed_bytes) as raw:
        for packed, content in batch.frames:
            if at < 0:
                head = read_head_frame(raw[:packed], content)
            else:
                sums.append(seekable.decompress_rows(raw[:packed], target[at : at + content]))
            raw = raw[packed:]  # noqa: PLW2901 - what is left of it
            at = at + content
    return BatchResult(b"".join(sums), head)


def read_plain_batch(file: RunContent, batch: FrameBatch, target: memoryview) -> BatchResult | None:
    """Read frames that are not compressed straight to their places, which saves a copy: a third of the time.

    None if this is no file, or if some frame is another one or damaged. Raises Damaged if the head is, or OSError.
    """
    head_bytes, head_content = batch.frames[0] if batch.content < 0 else (0, 0)
    rows = batch.frames[1:] if head_bytes else batch.frames
    if file.descriptor is None or not rows or rows[-1][1] < SHORT:
        return None
    begin = max(batch.content, 0)
    place = target[begin : begin + sum(content for _, content in rows)]
    sums = read_plain_frames(file.descriptor, batch.at + head_bytes, place, FRAME)
    if sums is None or not head_bytes:
        return None if sums is None else BatchResult(sums)
    with file.read_piece(batch.at, head_bytes) as raw:
        return BatchResult(sums, read_head_frame(raw, head_content))


def read_head_frame(frame: memoryview, content: int) -> bytes:
    """Return the description of the file, which is its first frame. content: its uncompressed bytes. Raises Damaged."""
    if content > MAX_HEAD_BYTES:
        raise Damaged("the header is too long")
    found = bytearray(content)
    seekable.decompress(frame, memoryview(found))
    return bytes(found)


def group_frames(frames: list[Sizes]) -> list[FrameBatch]:
    """Return all frames in batches of neighbours, each of which is read at once."""
    together: list[list[Sizes]] = [[]]
    for frame in frames:
        if together[-1] and sum(packed for packed, _ in together[-1]) + frame[0] > PIECE_BYTES:
            together.append([])
        together[-1].append(frame)
    found = list[FrameBatch]()
    at = 0
    content = -frames[0][1]
    for group in together:
        found.append(FrameBatch(at, tuple(group), content))
        at += sum(packed for packed, _ in group)
        content += sum(size for _, size in group)
    return found


@contextmanager
def borrow_scratch(length: int) -> Iterator[memoryview]:
    """Yield whole pages to read into.

    They are used again and again, because pages that were never touched are slow.
    """
    whole = -(-length // PAGE) * PAGE
    try:
        space = _free_scratch.pop()
    except IndexError:
        space = mmap.mmap(-1, PIECE_BYTES + 2 * PAGE)
    if len(space) >= whole:
        yield memoryview(space)[:whole]
        _free_scratch.append(space)
    else:
        yield memoryview(mmap.mmap(-1, whole))


def prepare_scratch(count: int) -> None:
    """Prepare such pages for this many readers before any restore waits for them."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    for _ in range(count - len(_free_scratch)):
        space = mmap.mmap(-1, PIECE_BYTES + 2 * PAGE)
        np.frombuffer(space, np.uint8).fill(0)
        _free_scratch.append(space)


def read_fully(descriptor: int, view: memoryview, at: int, least: int) -> None:
    """Read into `view` until it has `least` bytes. A read may give less than it was asked for."""
    done = 0
    while done < least:
        count = os.preadv(descriptor, [view[done:]], at + done)
        if not count:
            raise Damaged("the file ends early")
        done += count


def read_exactly(descriptor: int, at: int, length: int) -> bytearray:
    """Read exactly this many bytes. Raises Damaged if there are fewer."""
    raw = bytearray(length)
    read_fully(descriptor, memoryview(raw), at, length)
    return raw
