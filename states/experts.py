"""Which experts are on the device: those that steps have needed most of late. Host memory has all of them.

An expert that is needed and not there is brought for that step alone, so a place saves one transfer for every step that
needs whoever has it: what is counted is steps, not rows. Uses fade, since what people talk about changes. Nobody takes
a place for being needed a little more often, which would be chance: a move costs a transfer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from attrs import frozen

MOST_MOVES = 64  # of one report: of 9 MiB each, 0.6 GiB, about what 32 steps of one row bring anyway
UNIT = 16  # of a use, so that what is left of a few fades, too
FADING = 8  # of what was counted before, one in so many is forgotten at every report

Moves = tuple[tuple[int, int], ...]


@frozen
class Residents:
    """uses: of every expert. places: whose each is."""

    uses: tuple[int, ...] = ()
    places: tuple[int, ...] = ()


def begin(experts: int, places: int) -> Residents:
    """Before anything is known: as many of every layer."""
    return Residents((0,) * experts, tuple(place * experts // places for place in range(places)))


def moved(residents: Residents, counts: Sequence[int]) -> tuple[Residents, Moves]:
    """counts: of every expert, the steps since the last report that needed it. Who gets whose place, and why is above:
    the most used without one, in the order of their numbers where they are equal, those of the least used.
    """
    uses = tuple(before - before // FADING + UNIT * count for before, count in zip(residents.uses, counts, strict=True))
    places, there = list(residents.places), set(residents.places)
    coming = nsmallest(MOST_MOVES, (n for n in range(len(uses)) if n not in there), lambda n: (-uses[n], n))
    leaving = nsmallest(MOST_MOVES, range(len(places)), lambda place: (uses[places[place]], place))
    moves = list[tuple[int, int]]()
    for place, expert in zip(leaving, coming, strict=False):
        held = uses[places[place]]
        if uses[expert] <= held + held // 4 + UNIT:
            break
        places[place] = expert
        moves.append((place, expert))
    return Residents(uses, tuple(places)), tuple(moves)
