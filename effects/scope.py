"""The scope of the prefix cache: how much of a prompt is worth keeping beyond the device."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

MAX_COUNT = 1_000_000  # tokens, and recent prompts
DEFAULT_WINDOW = 30  # recent prompts that `auto` compares with
ACCEPTED_FORMS = f'"off", "full", "auto", "auto:N" or N, with N from 1 to {MAX_COUNT}'


@frozen
class Scope:
    """A limit on what is written, and where checkpoints go. Rows that are kept are always found, except with `off`.

    `full` keeps prompt and answer. `auto` keeps what the prompt has in common with the most similar of the last `count`
    prompts, down to a message boundary. `fixed` keeps the first `count` tokens. All of them end at a multiple of the
    block size.
    """

    kind: Literal["off", "full", "auto", "fixed"] = "full"
    count: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse impossible scopes. They also come out of traces, which are hostile input."""
        counted = self.kind in {"auto", "fixed"}
        if not (1 <= self.count <= MAX_COUNT if counted else self.count == 0):
            raise ValueError(f"a scope that cannot be: {self.kind}, {self.count}")

    def __str__(self) -> str:
        """Return the text that `parse_scope` reads back."""
        return {"auto": f"auto:{self.count}", "fixed": str(self.count)}.get(self.kind, self.kind)


@frozen
class Selection:
    """The rows that a scope selects of one sequence, and why."""

    scope: str = ""
    reason: str = ""  # machine-readable
    shared: int = 0  # tokens in common with the most similar recent prompt
    boundary: int = 0  # where the scope says to stop
    rows: int = 0  # that are kept: up to the boundary, as far as they are valid, in whole blocks; 0: too few

    def __str__(self) -> str:
        """Return the line for the log."""
        return f"{self.scope} shared={self.shared} selected={self.boundary} kept={self.rows} ({self.reason})"


def parse_scope(value: object) -> Scope:
    """Parse a scope as people and requests write it, in any case. Raises ValueError with what is accepted."""
    if isinstance(value, str):
        word = value.lower()
        if word == "off":
            return Scope("off")
        if word == "full":
            return Scope("full")
        if word == "auto":
            return Scope("auto", DEFAULT_WINDOW)
        window = parse_count(word.removeprefix("auto:")) if word.startswith("auto:") else None
        if window is not None:
            return Scope("auto", window)
    number = parse_count(value)
    if number is None:
        raise ValueError(f"must be {ACCEPTED_FORMS}")
    return Scope("fixed", number)


def parse_count(value: object) -> int | None:
    """Return an integer from 1 to a million, given as such or as a string; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 12:
        value = int(value)
    return value if type(value) is int and 1 <= value <= MAX_COUNT else None
