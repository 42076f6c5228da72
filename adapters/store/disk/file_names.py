"""Classifies files in a cache folder by their names. Files with other names are never read, moved or removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from adapters.store import index_journal
from adapters.store.block_keys import KEY_BYTES
from adapters.store.files.file_format import parse_name
from adapters.store.files.private_folder import LOCK, TEMPORARY

QUARANTINE = "damaged-"
CHOICE = "auto-codec"  # what `auto` chose: `adapters/store/disk/codec_choice.py`
ListKind: TypeAlias = Literal["recent", "answers"]
LIST_KINDS: Mapping[str, ListKind] = {"recent": "recent", "answers": "answers"}
FileRole: TypeAlias = Literal["lock", "journal", "run", ListKind, "codec", "temporary", "quarantined", "foreign"]


def classify_name(name: str) -> FileRole:
    """Return what a file of the cache folder is, by its name.

    A quarantined file is a run that was found damaged, and renamed. A foreign one has a name that no server gives.
    """
    fixed: dict[str, FileRole] = {LOCK: "lock", index_journal.NAME: "journal", CHOICE: "codec"}
    if name in fixed:
        return fixed[name]
    if parse_name(name) is not None:
        return "run"
    if (kind := find_list_kind(name)) is not None:
        return kind
    whole = {"run", "recent", "answers", "journal", "codec"}
    if name.startswith(TEMPORARY) and classify_name(name.removeprefix(TEMPORARY)) in whole:
        return "temporary"
    is_damaged_run = name.startswith(QUARANTINE) and classify_name(name.removeprefix(QUARANTINE)) == "run"
    return "quarantined" if is_damaged_run else "foreign"


def find_list_kind(name: str) -> ListKind | None:
    """Return whether this is the name of a list of recent prompts or answers."""
    kind, _, digits = name.partition("-")
    if kind not in LIST_KINDS or len(digits) != 2 * KEY_BYTES or not set(digits) <= set("0123456789abcdef"):
        return None
    return LIST_KINDS[kind]


def format_list_name(kind: ListKind, origin: bytes) -> str:
    """Return the name of a list of recent prompts or answers of one identity. origin: the root of its block keys."""
    return f"{kind}-{origin.hex()}"
