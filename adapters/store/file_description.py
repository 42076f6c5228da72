"""What a file of ours says of itself, as an entry of the index: from its name, its seek table and its first frame."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.store.block_index import Entry
from adapters.store.block_keys import root
from adapters.store.files import seekable
from adapters.store.files.file_format import MOST_HANDLE, MOST_HEAD, Head, Run, parse_head, parse_name
from adapters.store.files.private_folder import Folder
from adapters.store.files.read_run import exactly
from adapters.store.files.seekable import Damaged


def entry_in(folder: Folder, name: str) -> Entry:
    """What a file of ours says of itself, from its seek table and its first frame.

    Raises Damaged, Newer, Outdated or OSError.
    """
    named = parse_name(name)
    assert named is not None
    descriptor = folder.opener(name)
    try:
        size = os.fstat(descriptor).st_size
        return entry_named(named, read_head(descriptor, size), size)
    finally:
        os.close(descriptor)


def entry_named(named: tuple[bytes, int], said: Head, size: int) -> Entry:
    """The entry of a file of so many bytes, from its name and its head. Raises Damaged where they do not agree."""
    key, handle = named
    if said.run.keys[-1] != key:
        raise Damaged("the file has another run's name")
    if handle > MOST_HANDLE:
        raise Damaged("the number in the file's name cannot be")
    return entry_of(said.run, handle, size, root(said.identity, said.block_size))


def entry_of(run: Run, handle: int, size: int, origin: bytes) -> Entry:
    return Entry(
        handle, run.start, run.parent, run.keys, run.tokens, size, origin, used=handle, kind=run.kind, since=run.since
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """Many objects are made at once and none of them is garbage: looking for some took half of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def read_head(descriptor: int, size: int) -> Head:
    """Of an open file of ours, nothing else of it read. Raises Damaged, Newer, Outdated or OSError."""
    foot = seekable.FOOT.size
    if size < foot:
        raise Damaged("the file is too short")
    count = seekable.frame_count(exactly(descriptor, size - foot, foot))
    length = seekable.table_size(count)
    if count < 2 or length > size:
        raise Damaged("the seek table is longer than the file")
    frames = seekable.parse_table(exactly(descriptor, size - length, length), size)
    packed, content = frames[0]
    if content > MOST_HEAD:
        raise Damaged("the header is too long")
    raw = bytearray(content)
    seekable.decompress(exactly(descriptor, 0, packed), memoryview(raw))
    return parse_head(raw)
