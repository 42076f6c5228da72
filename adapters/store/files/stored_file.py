"""Reads and writes stored files, those whose frames are not compressed, in one call of the compiled library.

The problem: at the speed of memory a thread reads a run of 4 MiB within a millisecond, and eight threads read at once.
What they do between calls of the system needs the interpreter, which one thread has at a time. Behind 4 MiB of rows it
also finds little of its own code in the processor's cache. So a dozen short calls for each run kept five of eight cores
waiting (decisions 063 and 075).

How it works. All of a stored file follows from its run, except the sums of its blocks. So the rest is encoded
beforehand (`plan_file`). One call of C then opens several files, brings their rows to their places, and sums all blocks
(`read_files`). What is left to do in Python is to complete each head with the digest of these sums, and to compare it.
A file that is not exactly this one is read again by `fill_target`, which says what is wrong with it. The objects of a
call lie in one piece of memory, since each piece costs cache misses (decision 082).

Writing goes the other way (`RowsToWrite`): one call sums rows and writes them from where they lie, and another one
adds the head and the table.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeAlias

from attrs import frozen

from adapters.store.files import seekable
from adapters.store.files.block_sums import SUM_BYTES, count_blocks
from adapters.store.files.file_format import (
    DIGEST,
    FRAME,
    Kind,
    Layout,
    Run,
    digest_sums,
    encode_around_digest,
    split_frames,
)
from adapters.store.files.frames_library import find_address, load_functions
from adapters.store.files.plain_frames import LEVEL, SHORT, count_frame_bytes, count_head_bytes, pack_head
from adapters.store.files.seekable import Sizes


@frozen(cache_hash=True)
class StoredRows:
    """The frames that rows of one size become. content, frames, packed_bytes: without a short last frame.

    short_bytes: the content of that one, which is compressed; 0 for none.
    """

    content: int
    frames: tuple[Sizes, ...]
    packed_bytes: int
    short_bytes: int


@lru_cache(64)
def measure_rows(size: int) -> StoredRows:
    """Return what rows of so many bytes become. There is a compiled library."""
    contents = [stop - start for start, stop in split_frames(size)]
    short = contents.pop() if contents and contents[-1] < SHORT else 0
    frames = tuple((count_frame_bytes(content), content) for content in contents)
    return StoredRows(size - short, frames, sum(packed for packed, _ in frames), short)


@lru_cache(256)
def measure_run(layout: Layout, kind: Kind, length: int) -> StoredRows:
    """Return what the rows of a run of so many tokens become. There is a compiled library."""
    return measure_rows(layout.compute_size(kind, length))


@lru_cache(64)
def encode_stored_table(head_bytes: int, content: int, rows: StoredRows) -> bytes:
    """Return the table of a stored file whose last frame is no short one. content: bytes of its head, uncompressed."""
    return seekable.encode_table([(head_bytes, content), *rows.frames])


# --- reading ---


@frozen(eq=False)
class StoredFile:
    """All parts that a stored file must have. before, after: its head, around the digest of the sums.

    head_bytes: of the frame of the head. plain_bytes: of its content if that is not compressed, else 0.
    """

    rows: StoredRows
    size: int
    head_bytes: int
    plain_bytes: int
    before: bytes
    after: bytes
    table: bytes

    @property
    def end_bytes(self) -> int:
        return self.head_bytes + len(self.table)

    @property
    def space_bytes(self) -> int:
        """Return the bytes of its head, its table and the sums of its blocks."""
        return self.end_bytes + SUM_BYTES * count_blocks(self.rows.content)

    def matches(self, space: bytes, begin: int) -> bool:
        """Say whether a file has this head and this table, which were read into `space` from `begin` on, and then the
        sums of the blocks of its rows.
        """
        table = begin + self.head_bytes
        sums = table + len(self.table)
        if not space.startswith(self.table, table):
            return False
        digest = digest_sums([space[sums : begin + self.space_bytes]])
        head = b"%b%b%b" % (self.before, digest.hex().encode(), self.after)
        if self.plain_bytes:
            return space.startswith(head, begin)
        try:
            return seekable.decompress_exactly(space[begin:table], len(head)) == head
        except seekable.Damaged:
            return False


Found: TypeAlias = Literal["read", "not_cached", "other"]  # other: it is no such file, or cannot be read


@frozen(eq=False)
class PlannedRead:
    """A file to read. address: of the memory for its rows, used by no other thread meanwhile."""

    plan: StoredFile
    path: bytes
    address: int


def plan_file(size: int, run: Run, layout: Layout) -> StoredFile | None:
    """Describe the file of a run, if it can be a stored one that is read in one call; else return None.

    size: of the file, as it was written.
    """
    if load_functions() is None:
        return None
    rows = measure_run(layout, run.kind, run.length)
    head_bytes = size - rows.packed_bytes - seekable.compute_table_size(1 + len(rows.frames))
    if rows.short_bytes or not rows.frames or head_bytes <= 0:
        return None
    before, after = encode_around_digest(run, layout)
    content = len(before) + 2 * DIGEST + len(after)
    is_plain = head_bytes == count_head_bytes(content)
    if not is_plain and head_bytes > seekable.compute_bound(content):
        return None
    table = encode_stored_table(head_bytes, content, rows)
    return StoredFile(rows, size, head_bytes, content if is_plain else 0, before, after, table)


# A file as the library reads it: `stored_t` in frames.h.
FILE_CALL = struct.Struct("P4l2P2lPl")
FOUND: dict[int, Found] = {0: "read", 1: "not_cached", -1: "other"}


def read_files(reads: Sequence[PlannedRead], folder: int = -1, *, only_cached: bool = False) -> list[Found]:
    """Read the rows of files to their places, one file after the other. Any thread may call this.

    The interpreter is free meanwhile. folder: a descriptor, to which paths are relative unless they are absolute.
    only_cached: leave files that the page cache does not hold, and follow no link. Where a file is not read, its memory
    may hold anything.
    """
    compiled = load_functions()
    assert compiled is not None, "else nothing is planned"
    begins = [*accumulate((read.plan.space_bytes for read in reads), initial=FILE_CALL.size * len(reads))]
    space = ctypes.create_string_buffer(begins[-1])  # what the library is asked, then what it reads of each file
    address = ctypes.addressof(space)
    for number, (read, begin) in enumerate(zip(reads, begins, strict=False)):
        plan = read.plan
        place = address + begin
        FILE_CALL.pack_into(
            *(space, FILE_CALL.size * number, find_address(read.path), plan.size, plan.head_bytes, plan.plain_bytes),
            *(len(plan.table), place, read.address, plan.rows.content, FRAME, place + plan.end_bytes, 0),
        )
    missing = compiled.rekindle_read_files(folder, address, len(reads), only_cached)
    raw = space.raw
    states = [state for *_, state in FILE_CALL.iter_unpack(raw[: begins[0]])] if missing else [0] * len(reads)
    return [
        "other" if not state and not read.plan.matches(raw, begin) else FOUND[state]
        for read, begin, state in zip(reads, begins, states, strict=False)
    ]


# --- writing ---


@frozen(eq=False)
class RowsToWrite:
    """Rows that lie at an address, and become a stored file. Their memory stays as it is until they are written."""

    run: Run
    layout: Layout
    address: int

    @property
    def size(self) -> int:
        return self.layout.compute_size(self.run.kind, self.run.length)

    def write(self, temporary: str, path: str, *, replace: bool) -> int:
        """Write the file and return its size. It gets its name when it is whole. Raises OSError; then nothing is left.

        temporary: its name until then. Any thread may call this; the interpreter is free while rows are summed and
        written. The head is not compressed, so that its size is known before the sums are: they are taken while rows
        are written.
        """
        compiled = load_functions()
        assert compiled is not None, "callers have asked for it"
        rows = measure_run(self.layout, self.run.kind, self.run.length)
        before, after = encode_around_digest(self.run, self.layout)
        content = len(before) + 2 * DIGEST + len(after)
        head_bytes = count_head_bytes(content)
        sums = ctypes.create_string_buffer(SUM_BYTES * count_blocks(rows.content))
        new = os.fsencode(temporary)
        file = compiled.rekindle_begin_file(new, head_bytes, self.address, rows.content, FRAME, ctypes.addressof(sums))
        if file < 0:
            raise OSError(-file, os.strerror(-file), path)
        try:
            short, short_sums, sizes = self._compress_short_end(rows)
            first = pack_head(before + digest_sums([sums.raw, short_sums]).hex().encode() + after)
            rest = short + seekable.encode_table([(head_bytes, content), *rows.frames, *sizes])
        except BaseException:
            os.close(file)
            Path(temporary).unlink()
            raise
        error = compiled.rekindle_end_file(*(file, new, os.fsencode(path), replace, first, len(first), rest, len(rest)))
        if error:
            raise OSError(error, os.strerror(error), path)
        return len(first) + rows.packed_bytes + len(rest)

    def _compress_short_end(self, rows: StoredRows) -> tuple[bytes, bytes, list[Sizes]]:
        """Return the last frame, the sum of its content and its sizes, if it is a short one."""
        if not rows.short_bytes:
            return b"", b"", []
        content = ctypes.string_at(self.address + rows.content, rows.short_bytes)
        frame, sums = seekable.create_compressor(LEVEL).compress_rows(content)
        return frame, sums, [(len(frame), len(content))]


def can_write_rows(size: int) -> bool:
    """Say whether rows of so many bytes may be written from where they are. Short ones are compressed instead."""
    return load_functions() is not None and bool(measure_rows(size).frames)
