"""Reads the description of a run from its file, and returns it as an entry of the index.

The description is in the file's name, its seek table and its first frame.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.store.block_index import Entry
from adapters.store.block_keys import compute_root
from adapters.store.files import seekable
from adapters.store.files.file_format import MAX_HANDLE, MAX_HEAD_BYTES, FileHead, Run, parse_head, parse_name
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.read_run import read_exactly
from adapters.store.files.seekable import Damaged


def read_entry(folder: PrivateFolder, name: str) -> Entry:
    """Return the entry that a run's file describes, from its seek table and its first frame.

    Raises Damaged, Newer, Outdated or OSError.
    """
    named = parse_name(name)
    assert named is not None
    descriptor = folder.open_existing(name)
    try:
        size = os.fstat(descriptor).st_size
        return make_named_entry(named, read_head(descriptor, size), size)
    finally:
        os.close(descriptor)


def make_named_entry(named: tuple[bytes, int], said: FileHead, size: int) -> Entry:
    """Return the entry of a file from its name (key of the last block, handle), its head and its size in bytes.

    Raises Damaged if these do not agree.
    """
    key, handle = named
    if said.run.keys[-1] != key:
        raise Damaged("the file has another run's name")
    if handle > MAX_HANDLE:
        raise Damaged("the number in the file's name cannot be")
    return make_entry(said.run, handle, size, compute_root(said.identity, said.block_size))


def make_entry(run: Run, handle: int, size: int, origin: bytes) -> Entry:
    """Return the index entry of a run. The arguments: as in `Entry`."""
    return Entry(
        handle,
        run.start,
        run.parent,
        run.keys,
        run.tokens,
        size,
        origin,
        last_turn=handle,  # the turn in which the run was added, until the journal says otherwise
        kind=run.kind,
        since=run.since,
    )


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector.

    Many objects are made at once and none of them is garbage; looking took half of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def read_head(descriptor: int, size: int) -> FileHead:
    """Return the head of an open run's file, reading nothing else of it. Raises Damaged, Newer, Outdated or OSError."""
    foot = seekable.FOOT.size
    if size < foot:
        raise Damaged("the file is too short")
    count = seekable.parse_frame_count(read_exactly(descriptor, size - foot, foot))
    length = seekable.compute_table_size(count)
    if count < 2 or length > size:
        raise Damaged("the seek table is longer than the file")
    frames = seekable.parse_table(read_exactly(descriptor, size - length, length), size)
    packed, content = frames[0]
    if content > MAX_HEAD_BYTES:
        raise Damaged("the header is too long")
    raw = bytearray(content)
    seekable.decompress(read_exactly(descriptor, 0, packed), memoryview(raw))
    return parse_head(raw)
