"""Reads the files of a cache folder to their ends and finds damaged ones. `survey_folder.py` reads heads only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from adapters.sequence_layout import ELEMENT_BYTES
from adapters.store import recent_prompts
from adapters.store.disk.file_names import classify_name
from adapters.store.disk.survey_folder import Survey, read_seek_table, read_whole
from adapters.store.file_description import make_named_entry
from adapters.store.files import seekable
from adapters.store.files.file_format import (
    MAX_HEAD_BYTES,
    Newer,
    Outdated,
    Run,
    check_frames,
    digest_sums,
    parse_head,
    parse_name,
)
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.read_run import read_exactly
from adapters.store.files.seekable import Damaged
from adapters.store.recent_prompts import MAX_FILE_BYTES, RecentPrompts

MAX_DIMENSIONS = 8  # dimensions of a tensor


def check_contents(folder: PrivateFolder, found: Survey, step: Callable[[], None]) -> None:
    """Read every file of `list_contents` to its end, and correct the survey by what is found.

    Files with a fault go from `found.kept` to `found.damaged` or `found.unreadable`. A file that vanishes meanwhile was
    evicted. step: called behind each file.
    """
    names = list_contents(found)
    found.damaged.clear()
    found.unreadable.clear()
    for name in names:
        try:
            check_content(folder, name)
        except FileNotFoundError:
            pass
        except OSError as error:
            found.unreadable[name] = error.strerror or str(error)
        except Newer:
            found.newer.append(name)
        except Outdated:
            found.outdated.append(name)
        except Damaged as error:
            found.damaged[name] = str(error)
        step()
    others = {*found.damaged, *found.unreadable, *found.newer, *found.outdated}
    found.kept = [file for file in found.kept if file.name not in others]
    found.recent_prompts = [name for name in found.recent_prompts if name not in others]


def list_contents(found: Survey) -> list[str]:
    """Return the names of all runs, then those of files of recent prompts."""
    runs = [*(file.name for file in found.kept), *found.damaged, *found.unreadable]
    return [*sorted(runs), *found.recent_prompts]


def check_content(folder: PrivateFolder, name: str) -> None:
    """Read a run or a file of recent prompts to its end. Raises Damaged, Newer, Outdated, OSError."""
    if classify_name(name) in ("recent", "answers"):
        return check_recents(folder, name)
    descriptor = folder.open_existing(name)
    try:
        check_run(name, descriptor)
    finally:
        os.close(descriptor)


def check_run(name: str, descriptor: int) -> None:
    """Check name, seek table, head, keys, tensors, and the sums of all blocks.

    Raises Damaged, Newer, Outdated, OSError.
    """
    size = os.fstat(descriptor).st_size
    named = parse_name(name)
    assert named is not None
    frames = read_seek_table(descriptor, size)
    sums = list[bytes]()
    if len(frames) < 2 or frames[0][1] > MAX_HEAD_BYTES:
        raise Damaged("the header is too long, or all that there is")
    data = sum(content for _, content in frames[1:])
    check_frames(frames, data)
    at = frames[0][0]
    first = bytearray(frames[0][1])
    seekable.decompress(read_exactly(descriptor, 0, at), memoryview(first))
    said = parse_head(first)
    make_named_entry(named, said, size)
    check_tensor_spans(first, said.run, data)
    for packed, content in frames[1:]:
        frame = read_exactly(descriptor, at, packed)
        sums.append(seekable.decompress_rows(frame, memoryview(bytearray(content))))
        at += packed
    if digest_sums(sums) != said.sums:
        raise Damaged("these are not the rows that the head was written for")


def check_tensor_spans(raw: bytearray, run: Run, content: int) -> None:
    """Check that the tensors of a run lie end to end: the token ids, then the contents of the other frames.

    raw: the first frame, which begins as safetensors files do: 8 bytes of length, then JSON. content: bytes of all
    other frames together. Raises Damaged.
    """
    header = json.loads(bytes(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
    tensors = [(name, about) for name, about in header.items() if name != "__metadata__"]
    try:
        if not tensors or tensors[0][0] != "tokens" or parse_span(tensors[0][1]) != (0, len(run.tokens)):
            raise Damaged("the token ids are not the first tensor")
        at = 0
        for name, about in tensors:
            start, stop = parse_span(about)
            if start != at:
                raise Damaged(f"tensor {name[:60]} does not begin where the one before it ends")
            at = stop
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"the header's tensors cannot be read: {type(error).__name__}") from error
    if at != len(run.tokens) + content:
        raise Damaged("the tensors do not fill the file")


def parse_span(about: Mapping[str, Any]) -> tuple[int, int]:
    """Return the span of one tensor, which must be as long as its shape says.

    Raises ValueError, KeyError or TypeError.
    """
    start, stop = about["data_offsets"]
    shape = about["shape"]
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in (start, stop, *shape)):
        raise ValueError("no positions")
    if stop - start != prod(shape) * ELEMENT_BYTES[about["dtype"]]:
        raise ValueError("another length than its shape")
    return start, stop


def check_recents(folder: PrivateFolder, name: str) -> None:
    """Check a file of recent prompts or answers. A torn end is no damage, since a kill leaves one.

    Raises Damaged, Newer, OSError.
    """
    raw = read_whole(folder, name, MAX_FILE_BYTES)
    if recent_prompts.is_newer(raw):
        raise Newer
    recents = RecentPrompts(max_bytes=MAX_FILE_BYTES)
    if raw and not recent_prompts.restore_prompts(raw, recents) and not len(recents):
        raise Damaged("no recent prompts can be read from it")
