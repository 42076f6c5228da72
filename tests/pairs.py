"""Combinations of values that cover every pair of them, for tests whose full product would take too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allpairspy import AllPairs


def cover_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, so that any two values of two axes meet in a row.

    The first row has the first value of each axis. The rows are the same ones in every process.
    """
    return [tuple(row) for row in AllPairs([list(axis) for axis in axes])]
