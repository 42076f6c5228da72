"""What a file in a cache folder is, by its whole name: nothing else is ever read, moved or removed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from adapters.store import journal, recent
from adapters.store.blocks import KEY
from adapters.store.folder import LOCK, TEMPORARY
from adapters.store.format import parse_name

QUARANTINE = "damaged-"
CHOICE = "auto-codec"  # what `auto` chose: `adapters/store/choice.py`
What: TypeAlias = Literal["lock", "journal", "run", "recent", "codec", "temporary", "aside", "stranger"]


def what(name: str) -> What:
    fixed: dict[str, What] = {LOCK: "lock", journal.NAME: "journal", CHOICE: "codec"}
    if name in fixed:
        return fixed[name]
    if parse_name(name) is not None:
        return "run"
    if is_recent(name):
        return "recent"
    if name.startswith(TEMPORARY) and what(name.removeprefix(TEMPORARY)) in {"run", "recent", "journal", "codec"}:
        return "temporary"
    aside = name.startswith(QUARANTINE) and what(name.removeprefix(QUARANTINE)) == "run"
    return "aside" if aside else "stranger"


def is_recent(name: str) -> bool:
    digits = name.removeprefix(recent.PREFIX)
    return digits != name and len(digits) == 2 * KEY and set(digits) <= set("0123456789abcdef")
