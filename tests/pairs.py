"""Combinations of values that cover what matters, for tests whose full product would take too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from allpairspy import AllPairs


def cover_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, so that any two values of two axes meet in a row.

    The first row has the first value of each axis. The rows are the same ones in every process.
    """
    return [tuple(row) for row in AllPairs([list(axis) for axis in axes])]


def take_turns(many: Sequence[Any], few: Sequence[Any]) -> list[Any]:
    """Return a parameter `(one of many, one of few)` for every combination; most of them are marked as long.

    In a usual run each of `many` has one of `few`, in turn, and each of `few` has one of `many`.
    """
    turns = range(max(len(many), len(few)))
    usual = {(turn % len(many), turn % len(few)) for turn in turns}
    return [
        pytest.param(
            (one, other),
            id=f"{one}-{other}",
            marks=() if (number, place) in usual else pytest.mark.long,
        )
        for (number, one), (place, other) in product(enumerate(many), enumerate(few))
    ]


def in_turns(many: str, few: str, *, full: int, one_in: int = 3) -> pytest.MarkDecorator:
    """Mark most combinations of two parameters of a test as long.

    In a usual run the first `full` values of `many` meet every value of `few`. Each other one meets one value in
    `one_in`, in turn. many, few: names of parameters or of fixtures with parameters.
    """

    def is_usual(places: Mapping[str, int]) -> bool:
        return places[many] < full or places[many] % one_in == places[few] % one_in

    return usual_where(is_usual)


def with_first(*names: str) -> pytest.MarkDecorator:
    """Mark a test as long unless each of these parameters has its first value."""

    def is_usual(places: Mapping[str, int]) -> bool:
        return all(places[name] == 0 for name in names)

    return usual_where(is_usual)


def one_in(step: int, name: str, start: int = 0) -> pytest.MarkDecorator:
    """Mark a test as long unless the place of this parameter is `start`, `start + step` and so on."""

    def is_usual(places: Mapping[str, int]) -> bool:
        return places[name] % step == start

    return usual_where(is_usual)


def usual_where(is_usual: Callable[[Mapping[str, int]], bool]) -> pytest.MarkDecorator:
    """Mark a test as long unless `is_usual` says otherwise of the places of its parameters in their lists."""
    return pytest.mark.usual(where=is_usual)


def is_usual(item: pytest.Function) -> bool:
    """Return whether a usual run has this test, which is so unless one of its marks says otherwise."""
    markers = list(item.iter_markers("usual"))
    places = find_places(item) if markers else {}
    return all(marker.kwargs["where"](places) for marker in markers)


def find_places(item: pytest.Function) -> dict[str, int]:
    """Return the place of each parameter of a test in the list that it comes from."""
    places = dict(item.callspec.indices)  # right for fixtures; of others pytest counts combinations
    for marker in item.iter_markers("parametrize"):
        names, rows = marker.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
        for place, row in enumerate(rows):
            values = row.values if isinstance(row, ParameterSet) else row if len(names) > 1 else [row]
            if all(item.callspec.params[name] is value for name, value in zip(names, values, strict=True)):
                places |= dict.fromkeys(names, place)
    return places
