"""How much of a prompt is worth keeping beyond the device: the scope of the prefix cache."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

MOST = 1_000_000  # tokens, and recent prompts
WINDOW = 30  # recent prompts that `auto` compares with
ACCEPTED = f'"off", "full", "auto", "auto:N" or N, with N from 1 to {MOST}'


@frozen
class Scope:
    """It limits what is written and where checkpoints go; what is kept is always found, but for `off`.

    `full`: prompt and answer. `auto`: what the prompt shares with the likest of the last `count` prompts, down to a
    safe boundary. `fixed`: the first `count` prompt tokens. Every one ends at a multiple of the block size.
    """

    kind: Literal["off", "full", "auto", "fixed"] = "full"
    count: int = 0

    def __attrs_post_init__(self) -> None:
        """Scopes also come out of traces, which are hostile input."""
        counted = self.kind in {"auto", "fixed"}
        if not (1 <= self.count <= MOST if counted else self.count == 0):
            raise ValueError(f"a scope that cannot be: {self.kind}, {self.count}")

    def __str__(self) -> str:
        """What `parse` reads back."""
        return {"auto": f"auto:{self.count}", "fixed": str(self.count)}.get(self.kind, self.kind)


@frozen
class Selection:
    """What a scope picked of one sequence, and why."""

    scope: str = ""
    reason: str = ""  # machine-readable
    shared: int = 0  # tokens that the prompt begins with as the likest of the recent prompts does
    boundary: int = 0  # where the scope says to stop
    rows: int = 0  # what is kept: up to there, as far as there are rows, in whole blocks, if that is long enough

    def __str__(self) -> str:
        """For the log."""
        return f"{self.scope} shared={self.shared} selected={self.boundary} kept={self.rows} ({self.reason})"


def parse(value: object) -> Scope:
    """A scope as people and requests write it, letters of any case. Raises ValueError with what is accepted."""
    if isinstance(value, str):
        word = value.lower()
        if word == "off":
            return Scope("off")
        if word == "full":
            return Scope("full")
        if word == "auto":
            return Scope("auto", WINDOW)
        window = count(word.removeprefix("auto:")) if word.startswith("auto:") else None
        if window is not None:
            return Scope("auto", window)
    number = count(value)
    if number is None:
        raise ValueError(f"must be {ACCEPTED}")
    return Scope("fixed", number)


def count(value: object) -> int | None:
    """An integer from 1 to a million, or a string of one; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 12:
        value = int(value)
    return value if type(value) is int and 1 <= value <= MOST else None
