"""`rekindle cache ls`: shows what a cache folder holds, and for which sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.store.block_keys import TOKEN_BYTES
from adapters.store.disk import survey_folder
from adapters.store.disk.survey_folder import Survey, SurveyedFile, group_sequences
from effects.ids import Tokens
from engine.settings.output.formatting import format_bytes
from engine.settings.user_error import UserError
from engine.tools.cache.cache_folder import (
    SHOWN_IDENTITY,
    Identity,
    list_identities,
    make_wide_console,
    open_for_reading,
)

# The most sequences that are listed, unless all are requested.
LISTED = 20
SHOWN_TOKENS = 200  # tokens from the beginning of a sequence


def ls(path: Path, *, text: bool, model: Path | None, everything: bool, as_json: bool) -> int:
    """Print the list. Raises UserError."""
    decode = build_decoder(model) if text or model is not None else None
    with open_for_reading(path) as folder:
        found = survey_folder.survey(folder)
    identities = list_identities(found)
    if as_json:
        print(json.dumps({"folder": str(path), **build_json(found, identities, decode)}, indent=2))
        return 0
    console = make_wide_console(Console())
    console.print(print_summary(path, found, identities))
    if identities:
        console.print(build_identity_table(identities))
    for identity in identities:
        show_sequences(console, identity, decode, None if everything else LISTED)
    return 0


def build_decoder(model: Path | None) -> Callable[[Tokens], str]:
    from adapters.text.tokenizer import Tokenizer  # noqa: PLC0415 - only who asks for text waits for it

    folder = model or demo.FOLDER
    try:
        return Tokenizer.load(folder).decode
    except CheckpointError as error:
        raise UserError(f"--model {folder}: {error}") from error


def print_summary(path: Path, found: Survey, identities: Sequence[Identity]) -> Line:
    files = sum(len(identity.files) for identity in identities)
    tokens = sum(identity.tokens for identity in identities)
    line = Line(f"{path}: ", style="bold")
    line.append(f"{format_bytes(sum(found.sizes.values()))}, {files:,} kept files, {tokens:,} tokens", style="not bold")
    others = [
        (found.damaged, "damaged"),
        (found.unreadable, "unreadable"),
        (found.quarantined, "set aside as damaged"),
        (found.temporary, "unfinished"),
        (found.outdated, "of an earlier format"),
        (found.newer, "of a later format"),
        (found.foreign, "not ours"),
    ]
    for names, what in others:
        if names:
            line.append(f"; {len(names)} {what}", style="yellow")
    if found.journal is None or not found.journal.whole:
        line.append("; the journal is missing or torn, and the next start rebuilds it", style="yellow")
    return line


def build_table(*columns: str) -> Table:
    """Return an empty table whose first column is words and whose other columns are figures."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def build_identity_table(identities: Sequence[Identity]) -> Table:
    made = build_table(
        "identity", "block size", "runs", "draft", "states", "tokens", "on disk", "ratio", "hits", "last use (turn)"
    )
    for identity in identities:
        kinds = [sum(file.entry.kind == kind for file in identity.files) for kind in ("rows", "draft", "state")]
        counts = (str(identity.block_size), *(f"{count:,}" for count in kinds), f"{identity.tokens:,}")
        made.add_row(
            identity.name[:SHOWN_IDENTITY],
            *counts,
            format_bytes(identity.size),
            format_ratio(identity.files),
            str(identity.hits),
            str(identity.used),
        )
    return made


def format_ratio(files: Iterable[SurveyedFile]) -> str:
    """Return how much smaller the files are than their content."""
    listed = list(files)
    return f"{sum(file.content for file in listed) / max(1, sum(file.entry.size for file in listed)):.2f}x"


def show_sequences(
    console: Console, identity: Identity, decode: Callable[[Tokens], str] | None, most: int | None
) -> None:
    every = group_sequences(identity.files)
    console.print()
    console.print(f"Sequences of {identity.name[:SHOWN_IDENTITY]}, most recently used first:", highlight=False)
    made = build_table("tokens", "from token", "runs", "on disk", "ratio", "hits", "last use (turn)")
    made.columns[0].justify = "right"
    if decode is not None:
        made.expand = True
        made.add_column("text there", no_wrap=True, overflow="ellipsis", ratio=1)
    for sequence in every[:most]:
        files = sequence.files
        cells = [
            f"{sequence.stop:,}",
            f"{sequence.start:,}" if sequence.whole else f"{sequence.start:,}, front gone",
            f"{len(files):,}",
            format_bytes(sum(file.entry.size for file in files)),
            format_ratio(files),
            str(sequence.hits),
            str(sequence.used),
        ]
        if decode is not None:
            made.add_row(*cells, Line("… " * bool(sequence.start) + format_entry(files[0].entry.tokens, decode)))
        else:
            made.add_row(*cells)
    console.print(made)
    if most is not None and len(every) > most:
        console.print(f"and {len(every) - most:,} more: --all", style="dim")


def format_entry(packed: bytes, decode: Callable[[Tokens], str]) -> str:
    """Return the text of these tokens in one line that is safe to print. The text could be anything."""
    tokens = tuple(memoryview(packed[: SHOWN_TOKENS * TOKEN_BYTES]).cast("i"))
    text = "".join(char if char.isprintable() else " " for char in decode(tokens))
    return " ".join(text.split())


def read_texts(sequence: survey_folder.StoredSequence, decode: Callable[[Tokens], str] | None) -> dict[str, str]:
    if decode is None:
        return {}
    return {
        "text": format_entry(sequence.beginning, decode),
        "new_text": format_entry(sequence.files[0].entry.tokens, decode),
    }


def build_json(found: Survey, identities: Sequence[Identity], decode: Callable[[Tokens], str] | None) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "bytes": sum(found.sizes.values()),
        "identities": [
            {
                "identity": identity.name,
                "block_size": identity.block_size,
                "files": len(identity.files),
                "runs": len(identity.rows),
                "tokens": identity.tokens,
                "bytes": identity.size,
                "content_bytes": identity.content,
                "hits": identity.hits,
                "last_used_turn": identity.used,
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
                        **read_texts(sequence, decode),
                    }
                    for sequence in group_sequences(identity.files)
                ],
            }
            for identity in identities
        ],
        "damaged": found.damaged,
        "unreadable": found.unreadable,
        "put_aside": found.quarantined,
        "unfinished": found.temporary,
        "outdated": found.outdated,
        "newer": found.newer,
        "not_ours": found.foreign,
        "journal_whole": found.journal is not None and found.journal.whole,
    }
