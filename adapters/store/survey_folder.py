"""A cache folder looked at from outside, of whatever model, without a lock: what it holds, and whether it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from adapters.sequence_layout import ELEMENT_BYTES
from adapters.store import index_journal as journal
from adapters.store import recent_prompts
from adapters.store.block_index import Entry
from adapters.store.file_description import entry_named, no_collection, read_head
from adapters.store.file_names import what
from adapters.store.files import seekable
from adapters.store.files.file_format import (
    MOST_HEAD,
    Newer,
    Outdated,
    Run,
    check_frames,
    frames_digest,
    parse_head,
    parse_name,
)
from adapters.store.files.private_folder import Folder, FolderUnusable
from adapters.store.files.read_run import exactly
from adapters.store.files.seekable import Damaged, Sizes
from adapters.store.recent_prompts import MOST_FILE, Recents

MOST_SHAPE = 8  # dimensions of a tensor


@frozen(eq=False)
class SurveyedFile:
    """A file as it describes itself. content: bytes of its tensors, uncompressed."""

    name: str
    entry: Entry
    identity: str
    block_size: int
    content: int

    @property
    def run(self) -> Run:
        return self.entry.run


@define
class Survey:
    """Everything in a folder, by name. damaged, unreadable: what is wrong with a file, or with reading it."""

    kept: list[SurveyedFile] = field(factory=list[SurveyedFile])
    damaged: dict[str, str] = field(factory=dict[str, str])
    unreadable: dict[str, str] = field(factory=dict[str, str])
    newer: list[str] = field(factory=list[str])
    outdated: list[str] = field(factory=list[str])
    aside: list[str] = field(factory=list[str])  # damaged-*
    temporary: list[str] = field(factory=list[str])
    recents: list[str] = field(factory=list[str])
    strangers: list[str] = field(factory=list[str])  # not ours
    sizes: dict[str, int] = field(factory=dict[str, int])
    journal: journal.Replayed | None = None

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.sizes.get(name, 0) for name in names)


def is_cache(folder: Folder) -> bool:
    """Has a server ever used it? It leaves a journal from its start on."""
    return has_journal(folder) or any(what(name) == "run" for name, _ in folder.names())


def has_journal(folder: Folder) -> bool:
    """One of ours, of whatever version."""
    try:
        return read_whole(folder, journal.NAME, len(journal.ANY)) == journal.ANY
    except OSError:
        return False


def open_to_look(path: Path) -> Folder:
    """Raises FolderUnusable, also for a folder that is no cache."""
    folder = Folder.look(path)
    try:
        used = is_cache(folder)
    except OSError as error:
        folder.close()
        raise FolderUnusable(f"{path}: {error.strerror}") from error
    if not used:
        folder.close()
        raise FolderUnusable(f"{path}: no cache folder: there is neither a journal of ours nor a kept run")
    return folder


def survey(folder: Folder) -> Survey:
    """Reads the journal, and of each run its seek table and first frame. A file that vanishes meanwhile was evicted."""
    found = Survey(sizes=dict(folder.names()))
    known = read_journal(folder, found)
    with no_collection():
        for name in sorted(found.sizes):
            match what(name):
                case "lock" | "journal" | "codec":
                    pass
                case "aside":
                    found.aside.append(name)
                case "temporary":
                    found.temporary.append(name)
                case "recent":
                    found.recents.append(name)
                case "run":
                    describe(folder, name, known, found)
                case "stranger":
                    found.strangers.append(name)
    return found


def read_journal(folder: Folder, found: Survey) -> Mapping[int, Entry]:
    if not 0 < found.sizes.get(journal.NAME, 0) <= journal.MOST:
        return {}
    try:
        found.journal = journal.read(read_whole(folder, journal.NAME, journal.MOST))
    except OSError:
        return {}
    return found.journal.entries


def describe(folder: Folder, name: str, known: Mapping[int, Entry], found: Survey) -> None:
    try:
        descriptor = folder.opener(name)
        try:
            found.kept.append(described(name, descriptor, known))
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        found.sizes.pop(name, None)
    except Newer:
        found.newer.append(name)
    except Outdated:
        found.outdated.append(name)
    except Damaged as error:
        found.damaged[name] = str(error)
    except OSError as error:
        found.unreadable[name] = error.strerror or str(error)


def described(name: str, descriptor: int, known: Mapping[int, Entry]) -> SurveyedFile:
    named = parse_name(name)
    assert named is not None
    size = os.fstat(descriptor).st_size
    said = read_head(descriptor, size)
    entry = entry_named(named, said, size)
    remembered = known.get(named[1])
    if remembered is not None and remembered.keys == entry.keys:
        entry.hits, entry.used = remembered.hits, remembered.used
    return SurveyedFile(
        name, entry, said.identity, said.block_size, sum(content for _, content in table(descriptor, size)[1:])
    )


def table(descriptor: int, size: int) -> list[Sizes]:
    """(compressed, content) bytes of each frame. Raises Damaged, OSError."""
    foot = seekable.FOOT.size
    if size < foot:
        raise Damaged("the file is too short")
    length = seekable.table_size(seekable.frame_count(exactly(descriptor, size - foot, foot)))
    if length > size:
        raise Damaged("the seek table is longer than the file")
    return seekable.parse_table(exactly(descriptor, size - length, length), size)


# --- every byte ---


def verify(folder: Folder, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each run's name, and what is wrong with it; empty if it is whole, or was evicted meanwhile."""
    for name in names:
        try:
            descriptor = folder.opener(name)
            try:
                check_run(name, descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            yield name, ""
        except (Damaged, OSError) as error:
            yield name, str(error)
        else:
            yield name, ""


def check_run(name: str, descriptor: int) -> None:
    """Name, seek table, head, keys, tensors, every frame and its checksum. Raises Damaged, Newer, Outdated, OSError."""
    size, named = os.fstat(descriptor).st_size, parse_name(name)
    assert named is not None
    frames, checksums = table(descriptor, size), list[bytes]()
    if len(frames) < 2 or frames[0][1] > MOST_HEAD:
        raise Damaged("the header is too long, or all that there is")
    data = sum(content for _, content in frames[1:])
    check_frames(frames, data)
    at, first = frames[0][0], bytearray(frames[0][1])
    seekable.decompress(exactly(descriptor, 0, at), memoryview(first))
    said = parse_head(first)
    entry_named(named, said, size)
    check_tensors(first, said.run, data)
    for packed, content in frames[1:]:
        frame = exactly(descriptor, at, packed)
        seekable.decompress(frame, memoryview(bytearray(content)))
        checksums.append(seekable.checksum(frame))
        at += packed
    if frames_digest(checksums) != said.frames:
        raise Damaged("these are not the frames that the head was written for")


def check_tensors(raw: bytearray, run: Run, content: int) -> None:
    """The header's tensors lie end to end: the token ids, then what the other frames hold, to the last byte."""
    header = json.loads(bytes(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
    tensors = [(name, about) for name, about in header.items() if name != "__metadata__"]
    try:
        if not tensors or tensors[0][0] != "tokens" or span(tensors[0][1]) != (0, len(run.tokens)):
            raise Damaged("the token ids are not the first tensor")
        at = 0
        for name, about in tensors:
            start, stop = span(about)
            if start != at:
                raise Damaged(f"tensor {name[:60]} does not begin where the one before it ends")
            at = stop
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"the header's tensors cannot be read: {type(error).__name__}") from error
    if at != len(run.tokens) + content:
        raise Damaged("the tensors do not fill the file")


def span(about: Mapping[str, Any]) -> tuple[int, int]:
    """Of one tensor, which has to be as long as its shape says. Raises ValueError, KeyError or TypeError."""
    start, stop = about["data_offsets"]
    shape = about["shape"]
    if len(shape) > MOST_SHAPE or not all(type(one) is int and one >= 0 for one in (start, stop, *shape)):
        raise ValueError("no positions")
    if stop - start != prod(shape) * ELEMENT_BYTES[about["dtype"]]:
        raise ValueError("another length than its shape")
    return start, stop


def check_recents(folder: Folder, name: str) -> str:
    """What is wrong with a file of recent prompts; a torn tail is what a kill leaves, and nothing wrong."""
    try:
        raw = read_whole(folder, name, MOST_FILE)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    recents = Recents(most_bytes=MOST_FILE)
    if raw and not recent_prompts.read(raw, recents) and not len(recents):
        return "no recent prompts can be read from it"
    return ""


def read_whole(folder: Folder, name: str, most: int) -> bytes:
    descriptor = folder.opener(name)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
        return file.read(most)


# --- what belongs together ---


@define(eq=False)
class Sequence:
    """Tokens up to the end of a run that nothing continues. files: its own, so that each is in one sequence only.

    start: where its own files begin. whole: nothing in front of them is missing. beginning: its first tokens, packed,
    or where they are missing the first that are there.
    """

    files: list[SurveyedFile]
    whole: bool
    beginning: bytes

    @property
    def start(self) -> int:
        return self.files[0].entry.start

    @property
    def stop(self) -> int:
        return self.files[-1].entry.stop

    @property
    def used(self) -> int:
        return max(one.entry.used for one in self.files)

    @property
    def hits(self) -> int:
        return max(one.entry.hits for one in self.files)


def sequences(kept: Iterable[SurveyedFile]) -> list[Sequence]:
    """Of one identity, those used last first; each file in exactly one of them."""
    runs = [one for one in kept if one.entry.kind == "rows"]
    holders = {key: one for one in runs for key in one.entry.keys}
    continued = {one.entry.parent for one in runs}
    ends = [one for one in runs if one.entry.keys[-1] not in continued]
    taken = {one.name for one in ends}
    ends.sort(key=lambda one: (-one.entry.used, one.name))
    return [sequence(last, holders, taken) for last in ends]


def sequence(last: SurveyedFile, holders: Mapping[bytes, SurveyedFile], taken: set[str]) -> Sequence:
    """Back from its end: files that nobody has yet are its own, until one that somebody has."""
    files, one, before = [last], last, holders.get(last.entry.parent)
    while before is not None and before.name not in taken:
        taken.add(before.name)
        files.append(before)
        one, before = before, holders.get(before.entry.parent)
    while before is not None:
        one, before = before, holders.get(before.entry.parent)
    return Sequence(files[::-1], one.entry.start == 0, one.entry.tokens)
