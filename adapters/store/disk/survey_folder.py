"""Examines a cache folder from outside, without a lock and for any model: what it holds.

`check_contents.py` reads its files to their ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import define, field, frozen

from adapters.store import index_journal as journal
from adapters.store.block_index import Entry
from adapters.store.disk.file_names import classify_name
from adapters.store.file_description import make_named_entry, pause_garbage_collection, read_head
from adapters.store.files import seekable
from adapters.store.files.file_format import Newer, Outdated, Run, parse_name
from adapters.store.files.private_folder import FolderUnusable, PrivateFolder
from adapters.store.files.read_run import read_exactly
from adapters.store.files.seekable import Damaged, Sizes


@frozen(eq=False)
class SurveyedFile:
    """A file and its own description. content: bytes of its tensors, uncompressed."""

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
    quarantined: list[str] = field(factory=list[str])  # damaged-*
    temporary: list[str] = field(factory=list[str])
    recent_prompts: list[str] = field(factory=list[str])  # and answers
    foreign: list[str] = field(factory=list[str])  # names that are not ours
    sizes: dict[str, int] = field(factory=dict[str, int])
    journal: journal.JournalContents | None = None

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.sizes.get(name, 0) for name in names)


def is_cache(folder: PrivateFolder) -> bool:
    """Return True if a server has ever used the folder. A server leaves a journal there from its start on."""
    return has_journal(folder) or any(classify_name(name) == "run" for name, _ in folder.list_names())


def has_journal(folder: PrivateFolder) -> bool:
    """Return True if the folder has a journal of ours, of any version."""
    try:
        return read_whole(folder, journal.NAME, len(journal.ANY_MAGIC)) == journal.ANY_MAGIC
    except OSError:
        return False


def open_for_survey(path: Path) -> PrivateFolder:
    """Open a folder for a survey. Raises FolderUnusable, also for a folder that is no cache."""
    folder = PrivateFolder.open_read_only(path)
    try:
        used = is_cache(folder)
    except OSError as error:
        folder.close()
        raise FolderUnusable(f"{path}: {error.strerror}") from error
    if not used:
        folder.close()
        raise FolderUnusable(f"{path}: no cache folder: there is neither a journal of ours nor a kept run")
    return folder


def survey(folder: PrivateFolder) -> Survey:
    """Survey the folder. It reads the journal, and the seek table and first frame of each run.

    A file that vanishes meanwhile was evicted.
    """
    found = Survey(sizes=dict(folder.list_names()))
    known = read_journal(folder, found)
    with pause_garbage_collection():
        for name in sorted(found.sizes):
            match classify_name(name):
                case "lock" | "journal" | "codec":
                    pass
                case "quarantined":
                    found.quarantined.append(name)
                case "temporary":
                    found.temporary.append(name)
                case "recent" | "answers":
                    found.recent_prompts.append(name)
                case "run":
                    add_description(folder, name, known, found)
                case "foreign":
                    found.foreign.append(name)
    return found


def read_journal(folder: PrivateFolder, found: Survey) -> Mapping[int, Entry]:
    """Read the journal into `found.journal`, and return its entries by their numbers. Empty if it cannot be read."""
    if not 0 < found.sizes.get(journal.NAME, 0) <= journal.MAX_BYTES:
        return {}
    try:
        found.journal = journal.parse_journal(read_whole(folder, journal.NAME, journal.MAX_BYTES))
    except OSError:
        return {}
    return found.journal.entries


def add_description(folder: PrivateFolder, name: str, known: Mapping[int, Entry], found: Survey) -> None:
    try:
        descriptor = folder.open_existing(name)
        try:
            found.kept.append(describe_file(name, descriptor, known))
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


def describe_file(name: str, descriptor: int, known: Mapping[int, Entry]) -> SurveyedFile:
    named = parse_name(name)
    assert named is not None
    size = os.fstat(descriptor).st_size
    said = read_head(descriptor, size)
    entry = make_named_entry(named, said, size)
    remembered = known.get(named[1])
    if remembered is not None and remembered.keys == entry.keys:
        entry.hits = remembered.hits
        entry.last_turn = remembered.last_turn
    return SurveyedFile(
        name,
        entry,
        said.identity,
        said.block_size,
        sum(content for _, content in read_seek_table(descriptor, size)[1:]),
    )


def read_seek_table(descriptor: int, size: int) -> list[Sizes]:
    """Return (compressed, content) bytes of each frame. Raises Damaged, OSError."""
    foot = seekable.FOOT.size
    if size < foot:
        raise Damaged("the file is too short")
    length = seekable.compute_table_size(seekable.parse_frame_count(read_exactly(descriptor, size - foot, foot)))
    if length > size:
        raise Damaged("the seek table is longer than the file")
    return seekable.parse_table(read_exactly(descriptor, size - length, length), size)


def read_whole(folder: PrivateFolder, name: str, most: int) -> bytes:
    descriptor = folder.open_existing(name)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
        return file.read(most)


# --- what belongs together ---


@define(eq=False)
class StoredSequence:
    """The tokens up to the end of a run that no other run continues.

    files: those of this sequence; each file is in one sequence only.
    start: where these files begin.
    whole: nothing before them is missing.
    beginning: the first packed tokens of the sequence that are there.
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
        return max(file.entry.last_turn for file in self.files)

    @property
    def hits(self) -> int:
        return max(file.entry.hits for file in self.files)


def group_sequences(kept: Iterable[SurveyedFile]) -> list[StoredSequence]:
    """Group the files of one identity into sequences, those used last first; each file is in exactly one."""
    runs = [file for file in kept if file.entry.kind == "rows"]
    holders = {key: file for file in runs for key in file.entry.keys}
    continued = {file.entry.parent for file in runs}
    ends = [file for file in runs if file.entry.keys[-1] not in continued]
    taken = {file.name for file in ends}
    ends.sort(key=lambda file: (-file.entry.last_turn, file.name))
    return [trace_sequence(last, holders, taken) for last in ends]


def trace_sequence(last: SurveyedFile, holders: Mapping[bytes, SurveyedFile], taken: set[str]) -> StoredSequence:
    """Collect a sequence from its end back to the first file that another sequence has taken."""
    files = [last]
    first = last
    before = holders.get(last.entry.parent)
    while before is not None and before.name not in taken:
        taken.add(before.name)
        files.append(before)
        first = before
        before = holders.get(before.entry.parent)
    while before is not None:
        first = before
        before = holders.get(before.entry.parent)
    return StoredSequence(files[::-1], first.entry.start == 0, first.entry.tokens)
