"""The choice of copies for each member of a launch, and the rule that the device follows while the launch runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from effects.decode import MATCH_CLASSES, Copying, find_match_class
from states.speculation_plan import SpeculationControl


class CopyOption(NamedTuple):
    """One number of tokens that a member could copy, and the price of a step in which no other member copies."""

    at: int  # the index of the width
    width: int
    price: int
    branch: int = 0  # of these tokens, those on a branch


class ClassChoice(NamedTuple):
    """The number of tokens that are copied after matches of one class."""

    width: int  # 0: nothing is copied
    branch: int = 0  # of these tokens, those on a branch
    is_trial: bool = False  # copying is not expected to pay, and is tried once more
    could_pay: bool = False  # nothing is copied, but copying would pay if all copies were right


def count_likely_rows(controls: Sequence[SpeculationControl | None], chosen: Sequence[Sequence[ClassChoice]]) -> int:
    """Return how many rows the next step has, if members copy that have a match now.

    A launch may allow more rows than its members ever have together, and then the price of so many is never measured.
    """
    rows = len(controls)
    for control, choices in zip(controls, chosen, strict=True):
        group = -1 if control is None else find_match_class(control.matched)
        if choices and group >= 0:
            rows += choices[group].width
    return rows


def make_rule(choices: Sequence[ClassChoice], rows: int, steps: int) -> Copying:
    """Return the rule by which a member copies. choices: one for each class of matches, none if it copies nothing."""
    counts = tuple(choice.width - choice.branch for choice in choices)
    branches = tuple(choice.branch for choice in choices)
    nothing = (0,) * len(MATCH_CLASSES)
    return Copying(counts or nothing, rows, steps, branches or nothing)
