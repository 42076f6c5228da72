"""The result of one question of a retrieval benchmark. `needles` measures it and `needles_plot` draws it."""

from __future__ import annotations

from attrs import frozen


@frozen
class Cell:
    """One question about one text.

    depth: None if several needles are spread evenly.
    kept: the share of the text that was read.
    error: why there is no answer; empty if there is one.
    """

    method: str
    length: int
    needles: int
    depth: float | None
    number: int
    found: float = 0.0
    tokens: int = 0
    kept: float = 1.0
    prompt_ms: float = 0.0
    error: str = ""
