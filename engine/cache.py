"""`rekindle cache`: what a cache folder holds, whether it is whole, and making it smaller."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from attrs import define, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from adapters import demo
from adapters.models.config import CheckpointError
from adapters.store import journal, recent, survey
from adapters.store.blocks import WIDTH, root
from adapters.store.folder import Folder, FolderUnusable
from adapters.store.index import Index
from adapters.store.survey import Kept, Survey, sequences
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens
from engine.progress import progress
from engine.refusal import Refusal
from engine.simulation.report import WIDTH as COLUMNS
from engine.simulation.report import counted, size

LISTED = 20  # sequences, unless all are asked for
SHOWN_TOKENS = 200  # of a sequence's beginning
SHOWN_IDENTITY = 12  # hex digits


@frozen
class Identity:
    """What one model, with one kind of numerics, has here."""

    name: str
    block_size: int
    files: tuple[Kept, ...]

    @property
    def rows(self) -> list[Kept]:
        return [one for one in self.files if one.entry.kind == "rows"]

    @property
    def size(self) -> int:
        return sum(one.entry.size for one in self.files)

    @property
    def content(self) -> int:
        return sum(one.content for one in self.files)

    @property
    def tokens(self) -> int:
        """Whose rows are kept, each once."""
        return sum(one.entry.length for one in self.rows)

    @property
    def used(self) -> int:
        return max(one.entry.used for one in self.files)

    @property
    def hits(self) -> int:
        return sum(one.entry.hits for one in self.files)

    @property
    def origin(self) -> bytes:
        return root(self.name, self.block_size)


def identities(found: Survey) -> list[Identity]:
    """Used last, listed first."""
    groups: dict[tuple[str, int], list[Kept]] = {}
    for one in found.kept:
        groups.setdefault((one.identity, one.block_size), []).append(one)
    each = [Identity(name, block_size, tuple(files)) for (name, block_size), files in groups.items()]
    return sorted(each, key=lambda identity: (-identity.used, identity.name))


@contextmanager
def looked_at(path: Path) -> Iterator[Folder]:
    """A cache folder, only to read in. Raises Refusal."""
    try:
        folder = survey.open_to_look(path)
    except FolderUnusable as error:
        raise Refusal(str(error)) from error
    try:
        yield folder
    finally:
        folder.close()


# --- ls ---


def ls(path: Path, *, text: bool, model: Path | None, everything: bool, as_json: bool) -> int:
    """Raises Refusal."""
    decode = decoder(model) if text or model is not None else None
    with looked_at(path) as folder:
        found = survey.survey(folder)
    each = identities(found)
    if as_json:
        print(json.dumps({"folder": str(path), **described(found, each, decode)}, indent=2))
        return 0
    console = wide(Console())
    console.print(summary(path, found, each))
    if each:
        console.print(identity_table(each))
    for identity in each:
        show_sequences(console, identity, decode, None if everything else LISTED)
    return 0


def decoder(model: Path | None) -> Callable[[Tokens], str]:
    folder = model or demo.FOLDER
    try:
        return Tokenizer.load(folder).decode
    except CheckpointError as error:
        raise Refusal(f"--model {folder}: {error}") from error


def wide(console: Console) -> Console:
    return console if console.is_terminal else Console(width=COLUMNS + 10)


def summary(path: Path, found: Survey, each: Sequence[Identity]) -> Line:
    files, tokens = sum(len(identity.files) for identity in each), sum(identity.tokens for identity in each)
    line = Line(f"{path}: ", style="bold")
    line.append(f"{size(sum(found.sizes.values()))}, {files:,} kept files, {tokens:,} tokens", style="not bold")
    others = [
        (found.damaged, "damaged"),
        (found.unreadable, "unreadable"),
        (found.aside, "put aside as damaged"),
        (found.temporary, "unfinished"),
        (found.outdated, "of an earlier format"),
        (found.newer, "of a later format"),
        (found.strangers, "not ours"),
    ]
    for names, what in others:
        if names:
            line.append(f"; {len(names)} {what}", style="yellow")
    if found.journal is None or not found.journal.whole:
        line.append("; the journal is missing or torn, the next start makes up for it", style="yellow")
    return line


def table(*columns: str) -> Table:
    """The first column is words, the others are figures."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def identity_table(each: Sequence[Identity]) -> Table:
    made = table("identity", "block size", "runs", "draft", "states", "tokens", "on disk", "ratio", "hits", "last used")
    for one in each:
        kinds = [sum(file.entry.kind == kind for file in one.files) for kind in ("rows", "draft", "state")]
        counts = (str(one.block_size), *(f"{count:,}" for count in kinds), f"{one.tokens:,}")
        made.add_row(one.name[:SHOWN_IDENTITY], *counts, size(one.size), ratio(one.files), str(one.hits), str(one.used))
    return made


def ratio(files: Iterable[Kept]) -> str:
    """How much smaller the files are than what is in them."""
    listed = list(files)
    return f"{sum(one.content for one in listed) / max(1, sum(one.entry.size for one in listed)):.2f}x"


def show_sequences(
    console: Console, identity: Identity, decode: Callable[[Tokens], str] | None, most: int | None
) -> None:
    every = sequences(identity.files)
    console.print()
    console.print(f"Sequences of {identity.name[:SHOWN_IDENTITY]}, used last first:", highlight=False)
    made = table("tokens", "new from", "runs", "on disk", "ratio", "hits", "last used")
    made.columns[0].justify = "right"
    if decode is not None:
        made.expand = True
        made.add_column("text there", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in every[:most]:
        files = one.files
        cells = [
            f"{one.stop:,}",
            f"{one.start:,}" if one.whole else f"{one.start:,}, front gone",
            f"{len(files):,}",
            size(sum(file.entry.size for file in files)),
            ratio(files),
            str(one.hits),
            str(one.used),
        ]
        if decode is not None:
            made.add_row(*cells, Line("… " * bool(one.start) + shown(files[0].entry.tokens, decode)))
        else:
            made.add_row(*cells)
    console.print(made)
    if most is not None and len(every) > most:
        console.print(f"and {len(every) - most:,} more: --all", style="dim")


def shown(packed: bytes, decode: Callable[[Tokens], str]) -> str:
    """How these tokens begin, in one line of what a terminal may show: it could be anything."""
    tokens = tuple(memoryview(packed[: SHOWN_TOKENS * WIDTH]).cast("i"))
    text = "".join(char if char.isprintable() else " " for char in decode(tokens))
    return " ".join(text.split())


def texts(one: survey.Sequence, decode: Callable[[Tokens], str] | None) -> dict[str, str]:
    if decode is None:
        return {}
    return {"text": shown(one.beginning, decode), "new_text": shown(one.files[0].entry.tokens, decode)}


def described(found: Survey, each: Sequence[Identity], decode: Callable[[Tokens], str] | None) -> dict[str, Any]:
    """What --json prints."""
    return {
        "bytes": sum(found.sizes.values()),
        "identities": [
            {
                "identity": one.name,
                "block_size": one.block_size,
                "files": len(one.files),
                "runs": len(one.rows),
                "tokens": one.tokens,
                "bytes": one.size,
                "content_bytes": one.content,
                "hits": one.hits,
                "last_used_turn": one.used,
                "sequences": [
                    {
                        "tokens": sequence.stop,
                        "new_from": sequence.start,
                        "whole": sequence.whole,
                        "files": [file.name for file in sequence.files],
                        "bytes": sum(file.entry.size for file in sequence.files),
                        "content_bytes": sum(file.content for file in sequence.files),
                        "hits": sequence.hits,
                        "last_used_turn": sequence.used,
                        **texts(sequence, decode),
                    }
                    for sequence in sequences(one.files)
                ],
            }
            for one in each
        ],
        "damaged": found.damaged,
        "unreadable": found.unreadable,
        "put_aside": found.aside,
        "unfinished": found.temporary,
        "outdated": found.outdated,
        "newer": found.newer,
        "not_ours": found.strangers,
        "journal_whole": found.journal is not None and found.journal.whole,
    }


# --- verify ---


def verify(path: Path, *, as_json: bool) -> int:
    """1 if a file is damaged. Raises Refusal."""
    damaged: dict[str, str] = {}
    with looked_at(path) as folder:
        found = survey.survey(folder)
        names = sorted([*(one.name for one in found.kept), *found.damaged, *found.unreadable])
        with progress("files read", len(names)) as step:
            for name, wrong in survey.verify(folder, names):
                step()
                if wrong:
                    damaged[name] = wrong
        for name in found.recents:
            if wrong := survey.check_recents(folder, name):
                damaged[name] = wrong
    checked = sum(found.sizes.get(name, 0) for name in names)
    if as_json:
        print(json.dumps({"folder": str(path), "files": len(names), "bytes": checked, "damaged": damaged}, indent=2))
    else:
        console = wide(Console())
        for name, wrong in damaged.items():
            console.print(Line(f"{name}: {wrong}", style="red"), soft_wrap=True)
        console.print(f"{counted(len(names), 'file')} read, {size(checked)}: {len(damaged)} damaged", highlight=False)
    return 1 if damaged else 0


# --- gc ---


@frozen
class Unwanted:
    """What gc is to take away, beside what is of no use to anybody. identity: the beginning of the one to keep."""

    budget: int | None = None  # bytes
    identity: str = ""
    everything: bool = False


@define
class Removal:
    """Names by the reason that they go."""

    names: dict[str, str]
    left: list[Kept]

    def add(self, names: Iterable[str], why: str) -> None:
        self.names |= dict.fromkeys(names, why)


def gc(path: Path, unwanted: Unwanted, *, dry_run: bool) -> int:
    """Needs the folder for itself, but for a dry run. Raises Refusal, OSError."""
    with looked_at(path) as folder:
        if dry_run:
            report(survey.survey(folder), path, unwanted, done=False)
            return 0
    try:
        owned = Folder.open(path)
    except FolderUnusable as error:
        raise Refusal(str(error)) from error
    try:
        found = survey.survey(owned)
        removal = report(found, path, unwanted, done=True)
        for name in removal.names:
            owned.remove(name)
        anyio.run(owned.write, journal.NAME, [b"".join(journal.snapshot(one.entry for one in removal.left))])
    finally:
        owned.close()
    return 0


def report(found: Survey, path: Path, unwanted: Unwanted, *, done: bool) -> Removal:
    removal = removed(found, unwanted)
    console = wide(Console())
    reasons = dict.fromkeys(removal.names.values())
    for why in reasons:
        names = [name for name, reason in removal.names.items() if reason == why]
        console.print(f"{len(names):,} {why}: {size(found.bytes_of(names))}", highlight=False)
    freed, left = found.bytes_of(list(removal.names)), sum(one.entry.size for one in removal.left)
    word = "freed" if done else "would be freed"
    kept = f"kept files: {len(removal.left):,}, {size(left)}"
    console.print(f"{path}: {size(freed)} {word}, {kept}", highlight=False, soft_wrap=True)
    return removal


def removed(found: Survey, unwanted: Unwanted) -> Removal:
    """Decided before anything is touched. Raises Refusal."""
    removal = Removal({}, list(found.kept))
    removal.add([*found.aside, *found.damaged], "damaged")
    removal.add(found.temporary, "unfinished")
    removal.add(found.outdated, "of an earlier format")
    if unwanted.everything:
        removal.add([*(one.name for one in found.kept), *found.unreadable, *found.recents], "kept")
        removal.left = []
        return removal
    each = identities(found)
    if unwanted.identity:
        chosen = choose(each, unwanted.identity)
        removal.left = [one for one in found.kept if one.identity == chosen.name]
        mine = {recent.PREFIX + one.origin.hex() for one in each if one.name == chosen.name}
        others = [one.name for one in found.kept if one.identity != chosen.name]
        removal.add([*others, *(name for name in found.recents if name not in mine)], "of other identities")
    if unwanted.budget is not None and removal.left:
        shrink(removal, unwanted.budget, max(removal.left, key=lambda one: one.entry.used).entry.origin)
    return removal


def choose(each: Sequence[Identity], wanted: str) -> Identity:
    matching = {one.name: one for one in each if one.name.startswith(wanted.lower())}
    if len(matching) != 1:
        known = ", ".join(dict.fromkeys(one.name[:SHOWN_IDENTITY] for one in each)) or "none"
        what = "no identity begins" if not matching else "several identities begin"
        raise Refusal(f"--identity {wanted[:40]}: {what} so; accepted: the beginning of one of those here: {known}")
    (one,) = matching.values()
    return one


def shrink(removal: Removal, budget: int, origin: bytes) -> None:
    """What the server itself would evict for a smaller budget. origin: of the identity that goes last."""
    index = Index(budget, block_size=1, origin=origin)
    twice = [one for one in removal.left if not index.add(one.entry)]
    gone = {entry.handle for entry in index.make_room(0)} | {one.entry.handle for one in twice}
    names = [one.name for one in removal.left if one.entry.handle in gone]
    removal.add(names, "over the budget")
    removal.left = [one for one in removal.left if one.entry.handle not in gone]
