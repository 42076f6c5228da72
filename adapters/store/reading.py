"""Reading a run back: bounded by what it must be, decoded in threads while the next piece is read."""

from __future__ import annotations

import os
from typing import Any

import aiofiles
import anyio
import torch
from anyio import to_thread
from torch import Tensor

from adapters.store import seekable
from adapters.store.folder import Folder
from adapters.store.format import Layout, Run, check_frames, cuts, head
from adapters.store.seekable import Damaged, Sizes

PIECE = (4 << 20) + (64 << 10)  # bytes that are read at once: two frames that did not get smaller


async def read_rows(folder: Folder, name: str, size: int, run: Run, layout: Layout) -> Tensor:
    """The rows of `run`, uint8, all tensors end to end (`Layout.views` names them).

    Raises Damaged where the file is not exactly the one that we would write for this run, OSError where reading fails.
    """
    first, total = head(run, layout), layout.token_bytes * run.length
    async with aiofiles.open(name, "rb", buffering=0, opener=folder.opener) as file:
        descriptor = file.fileno()
        if os.fstat(descriptor).st_size != size:
            raise Damaged("the file has another size than when it was written")
        frames = await read_table(file, descriptor, size, 1 + len(cuts(total)))
        check_frames(frames, len(first), total)
        rows = torch.empty(total, dtype=torch.uint8)
        os.lseek(descriptor, 0, os.SEEK_SET)
        await read_frames(file, frames, first, rows.numpy().data)
    return rows


async def read_table(file: Any, descriptor: int, size: int, frames: int) -> list[Sizes]:
    length = seekable.table_size(frames)
    if length > size:
        raise Damaged("the file is too short")
    os.lseek(descriptor, size - length, os.SEEK_SET)
    return seekable.parse_table(await read_exactly(file, length), size)


async def read_frames(file: Any, frames: list[Sizes], first: bytes, target: memoryview) -> None:
    failures = list[Exception]()

    def decode(raw: memoryview, batch: list[Sizes], at: int) -> None:
        try:
            for packed, content in batch:
                if at < 0:
                    check_head(raw[:packed], first)
                    at = 0
                else:
                    seekable.decompress(raw[:packed], target[at : at + content])
                    at += content
                raw = raw[packed:]
        except Damaged as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        at = -1  # the head comes before the rows
        try:
            for batch in batches(frames):
                raw = await read_exactly(file, sum(packed for packed, _ in batch))
                tasks.start_soon(to_thread.run_sync, decode, memoryview(raw), batch, at)
                contents = sum(content for _, content in batch)
                at = contents - len(first) if at < 0 else at + contents
        except (OSError, Damaged) as error:  # outside, it would come in an exception group
            failures.append(error)
    if failures:
        raise failures[0]


def check_head(frame: memoryview, expected: bytes) -> None:
    found = bytearray(len(expected))
    seekable.decompress(frame, memoryview(found))
    if found != expected:
        raise Damaged("the file holds another run, or another model's")


def batches(frames: list[Sizes]) -> list[list[Sizes]]:
    """Neighbours that are read together."""
    together: list[list[Sizes]] = [[]]
    for frame in frames:
        if together[-1] and sum(packed for packed, _ in together[-1]) + frame[0] > PIECE:
            together.append([])
        together[-1].append(frame)
    return together


async def read_exactly(file: Any, length: int) -> bytes:
    """A read may give less than it was asked for."""
    raw: bytes = await file.read(length)
    while len(raw) < length:
        more = await file.read(length - len(raw))
        if not more:
            raise Damaged("the file ends early")
        raw += more
    return raw
