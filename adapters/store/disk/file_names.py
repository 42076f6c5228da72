"""Classifies files in a cache folder by their names. Files with other names are never read, moved or removed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from adapters.store import index_journal, recent_prompts
from adapters.store.block_keys import KEY_BYTES
from adapters.store.files.file_format import parse_name
from adapters.store.files.private_folder import LOCK, TEMPORARY

QUARANTINE = "damaged-"
CHOICE = "auto-codec"  # what `auto` chose: `adapters/store/disk/codec_choice.py`
FileRole: TypeAlias = Literal["lock", "journal", "run", "recent", "codec", "temporary", "aside", "stranger"]


def classify_name(name: str) -> FileRole:
    """Return what a file of the cache folder is, by its name. What we have not named is a `stranger`."""
    fixed: dict[str, FileRole] = {LOCK: "lock", index_journal.NAME: "journal", CHOICE: "codec"}
    if name in fixed:
        return fixed[name]
    if parse_name(name) is not None:
        return "run"
    if is_recent(name):
        return "recent"
    whole = {"run", "recent", "journal", "codec"}
    if name.startswith(TEMPORARY) and classify_name(name.removeprefix(TEMPORARY)) in whole:
        return "temporary"
    aside = name.startswith(QUARANTINE) and classify_name(name.removeprefix(QUARANTINE)) == "run"
    return "aside" if aside else "stranger"


def is_recent(name: str) -> bool:
    """Return whether this is the name of a list of recent prompts."""
    digits = name.removeprefix(recent_prompts.PREFIX)
    return digits != name and len(digits) == 2 * KEY_BYTES and set(digits) <= set("0123456789abcdef")
