"""`rekindle cache gc`: removes useless files and what the options name, by the rules of the server.

A file is damaged if `rekindle cache verify` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import define, frozen
from rich.console import Console

from adapters.store import index_journal, recent_prompts
from adapters.store.block_index import BlockIndex
from adapters.store.disk import check_contents, survey_folder
from adapters.store.disk.survey_folder import Survey, SurveyedFile
from adapters.store.files.private_folder import FolderUnusable, PrivateFolder
from engine.settings.output.formatting import format_bytes
from engine.settings.output.progress import count_progress
from engine.settings.user_error import UserError
from engine.tools.cache.cache_folder import (
    SHOWN_IDENTITY,
    Identity,
    list_identities,
    make_wide_console,
    open_for_reading,
)


@frozen
class RemovalOptions:
    """The files that gc removes besides useless ones. identity: the beginning of the only identity to keep."""

    budget: int | None = None  # bytes
    identity: str = ""
    everything: bool = False


@define
class Removal:
    """The names of files to remove, grouped by the reason."""

    names: dict[str, str]
    left: list[SurveyedFile]

    def add(self, names: Iterable[str], why: str) -> None:
        self.names |= dict.fromkeys(names, why)


def gc(path: Path, unwanted: RemovalOptions, *, dry_run: bool) -> int:
    """Remove files. It needs the folder for itself, except for a dry run. Raises UserError, OSError."""
    with open_for_reading(path) as folder:
        if dry_run:
            print_removal(survey_contents(folder, unwanted), path, unwanted, done=False)
            return 0
    try:
        owned = PrivateFolder.open(path)
    except FolderUnusable as error:
        raise UserError(str(error)) from error
    try:
        found = survey_contents(owned, unwanted)
        removal = print_removal(found, path, unwanted, done=True)
        for name in removal.names:
            owned.remove(name)
        owned.write_file(
            index_journal.NAME, [b"".join(index_journal.encode_snapshot(file.entry for file in removal.left))]
        )
    finally:
        owned.close()
    return 0


def survey_contents(folder: PrivateFolder, unwanted: RemovalOptions) -> Survey:
    """Survey the folder, and read all files to their ends unless everything goes. Damaged rows are found only so."""
    found = survey_folder.survey(folder)
    if not unwanted.everything:
        with count_progress("files read", len(check_contents.list_contents(found))) as step:
            check_contents.check_contents(folder, found, step)
    return found


def print_removal(found: Survey, path: Path, unwanted: RemovalOptions, *, done: bool) -> Removal:
    removal = describe_removal(found, unwanted)
    console = make_wide_console(Console())
    reasons = dict.fromkeys(removal.names.values())
    for why in reasons:
        names = [name for name, reason in removal.names.items() if reason == why]
        console.print(f"{len(names):,} {why}: {format_bytes(found.bytes_of(names))}", highlight=False)
    freed = found.bytes_of(list(removal.names))
    left = sum(file.entry.size for file in removal.left)
    word = "freed" if done else "would be freed"
    kept = f"kept files: {len(removal.left):,}, {format_bytes(left)}"
    console.print(f"{path}: {format_bytes(freed)} {word}, {kept}", highlight=False, soft_wrap=True)
    return removal


def describe_removal(found: Survey, unwanted: RemovalOptions) -> Removal:
    """Return what would be removed. Nothing is touched yet. Raises UserError."""
    removal = Removal({}, list(found.kept))
    removal.add([*found.quarantined, *found.damaged], "damaged")
    removal.add(found.temporary, "unfinished")
    removal.add(found.outdated, "of an earlier format")
    if unwanted.everything:
        removal.add([*(file.name for file in found.kept), *found.unreadable, *found.recent_prompts], "kept")
        removal.left = []
        return removal
    identities = list_identities(found)
    if unwanted.identity:
        chosen = choose_removal(identities, unwanted.identity)
        removal.left = [file for file in found.kept if file.identity == chosen.name]
        mine = {
            recent_prompts.PREFIX + identity.origin.hex() for identity in identities if identity.name == chosen.name
        }
        others = [file.name for file in found.kept if file.identity != chosen.name]
        removal.add([*others, *(name for name in found.recent_prompts if name not in mine)], "of other identities")
    if unwanted.budget is not None and removal.left:
        shrink_to_budget(
            removal, unwanted.budget, max(removal.left, key=lambda file: file.entry.last_turn).entry.origin
        )
    return removal


def choose_removal(identities: Sequence[Identity], wanted: str) -> Identity:
    matching = {identity.name: identity for identity in identities if identity.name.startswith(wanted.lower())}
    if len(matching) != 1:
        known = ", ".join(dict.fromkeys(identity.name[:SHOWN_IDENTITY] for identity in identities)) or "none"
        what = "no identity begins" if not matching else "several identities begin"
        raise UserError(f"--identity {wanted[:40]}: {what} with that; accepted: the start of one of these: {known}")
    (identity,) = matching.values()
    return identity


def shrink_to_budget(removal: Removal, budget: int, origin: bytes) -> None:
    """Choose what the server itself would evict for a smaller budget. origin: the identity whose files go last."""
    index = BlockIndex(budget, block_size=1, origin=origin)
    twice = [file for file in removal.left if not index.add(file.entry)]
    gone = {entry.handle for entry in index.make_room(0)} | {file.entry.handle for file in twice}
    names = [file.name for file in removal.left if file.entry.handle in gone]
    removal.add(names, "over the budget")
    removal.left = [file for file in removal.left if file.entry.handle not in gone]
