"""Reads and writes stored files, those whose frames are not compressed, in one call of the compiled library each.

The problem: at the speed of memory a thread reads a run of 4 MiB within a millisecond, and eight threads read at once.
What they do between calls of the system needs the interpreter, which one thread has at a time. Behind 4 MiB of rows it
also finds little of its own code in the processor's cache. So a dozen short calls for each run kept five of eight cores
waiting (decision 063).

How it works. All of a stored file follows from its run, except the checksums of its frames. So the rest is encoded
beforehand, on the event loop (`plan_file`). One call of C then opens the file, reads rows straight to their places, and
compares their checksums. What is left to do in Python is to complete the head with these, and to compare it. A file
that is not exactly this one is read again by `fill_target`, which says what is wrong with it.

Writing goes the other way. Rows are hashed (`prepare_file`), and one call writes them from where they lie.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from attrs import frozen

from adapters.store.files import seekable
from adapters.store.files.file_format import (
    FRAME,
    Expected,
    Layout,
    Run,
    digest_frames,
    encode_around_digest,
    encode_head,
    split_frames,
)
from adapters.store.files.plain_frames import SHORT, create_plain_compressor, load_functions
from adapters.store.files.seekable import CHECKSUM, Sizes


@frozen
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
    compiled = load_functions()
    assert compiled is not None, "callers have asked for it"
    contents = [stop - start for start, stop in split_frames(size)]
    short = contents.pop() if contents and contents[-1] < SHORT else 0
    frames = tuple((int(compiled.rekindle_frame_bytes(content)), content) for content in contents)
    return StoredRows(size - short, frames, sum(packed for packed, _ in frames), short)


# --- reading ---


@frozen(eq=False)
class StoredFile:
    """What a stored file must consist of. before, after: its head, around the digest of the frames' checksums.

    head_bytes: of the frame of the head.
    """

    rows: StoredRows
    size: int
    head_bytes: int
    before: bytes
    after: bytes
    table: bytes

    def read(self, path: str, address: int) -> bool:
        """Read the file's rows to this address. Return True if it is exactly this file.

        Otherwise the memory may hold anything. Any thread may call this; the interpreter is free meanwhile.
        """
        compiled = load_functions()
        assert compiled is not None, "else nothing is planned"
        ends = self.head_bytes + len(self.table)
        space = ctypes.create_string_buffer(ends + CHECKSUM * len(self.rows.frames))
        place = ctypes.addressof(space)
        failed = compiled.rekindle_read_file(
            *(os.fsencode(path), self.size, self.head_bytes, place, len(self.table)),
            *(address, self.rows.content, FRAME, place + ends),
        )
        found = space.raw
        return not failed and found[self.head_bytes : ends] == self.table and self._has_head(found, found[ends:])

    def _has_head(self, found: bytes, checksums: bytes) -> bool:
        head = self.before + digest_frames([checksums]).hex().encode() + self.after
        try:
            return seekable.decompress_exactly(found[: self.head_bytes], len(head)) == head
        except seekable.Damaged:
            return False


def plan_file(expected: Expected) -> StoredFile | None:
    """Describe the file of a run, if it can be a stored one that is read in one call; else return None."""
    if load_functions() is None:
        return None
    run, layout = expected.run, expected.layout
    rows = measure_rows(layout.compute_size(run.kind, run.length))
    head_bytes = expected.size - rows.packed_bytes - seekable.compute_table_size(1 + len(rows.frames))
    if rows.short_bytes or not rows.frames or head_bytes <= 0:
        return None
    before, after = encode_around_digest(run, layout)
    content = len(before) + len(digest_frames([]).hex()) + len(after)
    if head_bytes > seekable.compute_bound(content):
        return None
    table = seekable.encode_table([(head_bytes, content), *rows.frames])
    return StoredFile(rows, expected.size, head_bytes, before, after, table)


# --- writing ---


@frozen(eq=False)
class PreparedFile:
    """What a stored file has besides its rows. first: the frame of the head. rest: what stands behind the frames."""

    rows: StoredRows
    first: bytes
    checksums: bytes
    rest: bytes

    @property
    def size(self) -> int:
        return len(self.first) + self.rows.packed_bytes + len(self.rest)

    def write(self, temporary: str, path: str, address: int, *, replace: bool) -> None:
        """Write the file, with the rows at this address. It gets its name when it is whole. Raises OSError.

        temporary: its name until then. Any thread may call this; the interpreter is free meanwhile.
        """
        compiled = load_functions()
        assert compiled is not None, "else nothing is prepared"
        error = compiled.rekindle_write_file(
            *(os.fsencode(temporary), os.fsencode(path), replace, self.first, len(self.first)),
            *(address, self.rows.content, FRAME, self.checksums, self.rest, len(self.rest)),
        )
        if error:
            raise OSError(error, os.strerror(error), path)


def prepare_file(run: Run, layout: Layout, address: int) -> PreparedFile | None:
    """Hash rows that lie at an address, and encode what their file has besides. None if there is no compiled library.

    The file is the one that `encode_run` makes with plain frames. Any thread may call this.
    """
    compiled = load_functions()
    if compiled is None:
        return None
    compressor = create_plain_compressor()
    rows = measure_rows(layout.compute_size(run.kind, run.length))
    space = ctypes.create_string_buffer(CHECKSUM * len(rows.frames))
    compiled.rekindle_hash_frames(address, rows.content, FRAME, ctypes.addressof(space))
    checksums = space.raw
    sizes = [*rows.frames]
    short, ends = b"", [checksums]
    if rows.short_bytes:
        short = compressor.compress(ctypes.string_at(address + rows.content, rows.short_bytes))
        sizes.append((len(short), rows.short_bytes))
        ends.append(seekable.read_checksum(short))
    head = encode_head(run, layout, digest_frames(ends))
    first = compressor.compress(head)
    return PreparedFile(rows, first, checksums, short + seekable.encode_table([(len(first), len(head)), *sizes]))
