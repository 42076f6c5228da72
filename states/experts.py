"""The experts of a model that are on the device: those that recent steps have needed most. Host memory has all of them.

An expert that is needed and is not on the device is copied there for that step alone. So a place on the device saves
one copy for every step that needs its expert. Uses are therefore counted in steps and not in rows. They fade, because
what people talk about changes. And an expert has to be used clearly more often to take a place, because a move costs a
copy itself, and a small difference may be chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from attrs import frozen

# Moves after one report. An expert has 9 MiB, so these are 0.6 GiB at most, about what 32 steps of one row copy anyway.
MAX_MOVES = 64
USE_UNIT = 16  # a use counts 16, so that the remains of a few uses fade as well
FADE_DIVISOR = 8  # at every report an eighth of what was counted before is forgotten

Moves = tuple[tuple[int, int], ...]  # each (place, expert)


@frozen
class Residents:
    """The expert at each place of the device, and how much each expert was used. All layers are numbered through."""

    uses: tuple[int, ...] = ()  # by expert
    places: tuple[int, ...] = ()  # by place, the expert that has it


def make_residents(experts: int, places: int) -> Residents:
    """Return the residents before anything is known: every layer has the same share of the places."""
    return Residents((0,) * experts, tuple(place * experts // places for place in range(places)))


def choose_moves(residents: Residents, counts: Sequence[int]) -> tuple[Residents, Moves]:
    """Return the residents after a report, and the experts that are to be copied to the device.

    counts: by expert, the steps since the last report that needed it. The most used experts without a place take the
    places of the least used ones. Among equals the smaller number comes first.
    """
    uses = tuple(
        before - before // FADE_DIVISOR + USE_UNIT * count for before, count in zip(residents.uses, counts, strict=True)
    )
    places = list(residents.places)
    resident = set(residents.places)
    absent = (expert for expert in range(len(uses)) if expert not in resident)
    coming = nsmallest(MAX_MOVES, absent, lambda expert: (-uses[expert], expert))
    leaving = nsmallest(MAX_MOVES, range(len(places)), lambda place: (uses[places[place]], place))
    moves = list[tuple[int, int]]()
    for place, expert in zip(leaving, coming, strict=False):
        uses_here = uses[places[place]]
        if uses[expert] <= uses_here + uses_here // 4 + USE_UNIT:
            break
        places[place] = expert
        moves.append((place, expert))
    return Residents(uses, tuple(places)), tuple(moves)
