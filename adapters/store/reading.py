"""Reading a run back: bounded by what it must be, its pieces read and decoded side by side into their place."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Executor, wait

from attrs import frozen

from adapters.store import seekable
from adapters.store.folder import Folder
from adapters.store.format import Layout, Run, check_frames, cuts, head
from adapters.store.seekable import Damaged, Sizes

PIECE = (2 << 20) + (64 << 10)  # bytes that are read at once: a frame that did not get smaller
_scratch = threading.local()


@frozen
class Batch:
    """Neighbouring frames of an open file: where they begin in it, and their contents in the target."""

    at: int
    frames: tuple[Sizes, ...]
    content: int

    @property
    def packed(self) -> int:
        return sum(packed for packed, _ in self.frames)


@frozen
class Expected:
    """What a file must be: its size as it was written, and what must be in it."""

    size: int
    run: Run
    layout: Layout


def read_run(folder: Folder, name: str, expected: Expected, target: memoryview, pool: Executor) -> None:
    """Fill `target` with the tensors of a run, end to end (`Layout.views` names them). For a worker thread.

    Raises Damaged where the file is not exactly the one that we would write for this run, OSError where reading fails.
    """
    size, first = expected.size, head(expected.run, expected.layout)
    descriptor = folder.opener(name)
    try:
        if os.fstat(descriptor).st_size != size:
            raise Damaged("the file has another size than when it was written")
        read_ahead(descriptor, size)
        frames = read_table(descriptor, size, 1 + len(cuts(len(target))))
        check_frames(frames, len(first), len(target))
        own, *others = batches(frames)
        futures = [pool.submit(read_batch, descriptor, batch, target) for batch in others]
        try:
            check_head(read(descriptor, own.at, own.packed), first)
        except (Damaged, OSError):
            for future in futures:
                future.cancel()
            raise
        finally:
            wait(futures)  # nobody may write into the target, or read from the file, any more
        for future in futures:
            future.result()
    finally:
        os.close(descriptor)


def read_ahead(descriptor: int, size: int) -> None:
    """The kernel may begin with all of it at once."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)


def read_table(descriptor: int, size: int, frames: int) -> list[Sizes]:
    length = seekable.table_size(frames)
    if length > size:
        raise Damaged("the file is too short")
    return seekable.parse_table(read(descriptor, size - length, length), size)


def read_batch(descriptor: int, batch: Batch, target: memoryview) -> None:
    raw, at = read(descriptor, batch.at, batch.packed), batch.content
    for packed, content in batch.frames:
        seekable.decompress(raw[:packed], target[at : at + content])
        raw, at = raw[packed:], at + content


def check_head(frame: memoryview, expected: bytes) -> None:
    found = bytearray(len(expected))
    seekable.decompress(frame, memoryview(found))
    if found != expected:
        raise Damaged("the file holds another run, or another model's")


def batches(frames: list[Sizes]) -> list[Batch]:
    """The head by itself, then neighbours that are read together."""
    together: list[list[Sizes]] = [[frames[0]], []]
    for frame in frames[1:]:
        if together[-1] and sum(packed for packed, _ in together[-1]) + frame[0] > PIECE:
            together.append([])
        together[-1].append(frame)
    found, at, content = list[Batch](), 0, -frames[0][1]
    for group in together:
        found.append(Batch(at, tuple(group), content))
        at += sum(packed for packed, _ in group)
        content += sum(size for _, size in group)
    return found


def read(descriptor: int, at: int, length: int) -> memoryview:
    """In this thread's own memory, until it reads again. A read may give less than it was asked for."""
    space: bytearray = getattr(_scratch, "space", None) or bytearray(PIECE)
    if len(space) < length:
        space = bytearray(length)
    _scratch.space = space
    view, done = memoryview(space)[:length], 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], at + done)
        if not count:
            raise Damaged("the file ends early")
        done += count
    return view
