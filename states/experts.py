"""Experts that the device has no room for: either the host computes them, or they are copied to the device when needed.

`choose_expert_placement` chooses between the two once, at the start of the server. The rest of this module is about the
second way. Host memory has all experts then, and the device has a number of expert slots. `choose_moves` decides after
each report which experts have these slots: those that recent steps have needed most.

An expert that a step needs and that has no slot is copied to the device for that step alone. So a slot saves one copy
in every step that needs its expert. Therefore uses are counted in steps and not in rows. Earlier uses fade, because the
subjects of conversations change. To take another expert's slot, an expert has to be needed clearly more often: the move
costs a copy itself, and a small difference may be chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from attrs import frozen

# Moves after one report. An expert has 9 MiB, so these are 0.6 GiB at most, about what 32 steps of one row copy anyway.
MAX_MOVES = 64
USE_UNIT = 16  # a use counts 16, so that the remains of a few uses fade as well
FADE_DIVISOR = 8  # at every report an eighth of what was counted before is forgotten


@frozen
class ExpertPrices:
    """Measured times, in nanoseconds, for one decoded row.

    compute_ns: the host computes the row's experts of one layer, including the transfer of the row to the host and
    back. bring_ns: the weights of one expert are copied to the device.
    """

    compute_ns: int
    bring_ns: int


@frozen
class ExpertPlacement:
    """The way in which experts are computed that the device has no room for.

    cpu_layers: the host computes the experts of this many layers, the first ones. brings: host memory has all experts,
    and those that a step needs are copied to the device.
    """

    cpu_layers: int = 0
    brings: bool = False


def choose_expert_placement(prices: ExpertPrices, least: int, chosen: int) -> ExpertPlacement:
    """Return the quicker way for a decoded row: the host computes the experts of `least` layers, or they are copied.

    A mixture of both ways is never quicker than the better of the two, because the time grows linearly with the number
    of layers that the host computes. The device holds the same share of all experts either way. So if all experts are
    needed equally often, a row lacks as many experts on the device as it has in `least` layers. Therefore it is enough
    to compare the times of one layer.

    least: layers whose experts have to leave the device, so that the other layers' experts fit. chosen: the experts
    that the router picks for a row in one layer.
    """
    if prices.compute_ns < chosen * prices.bring_ns:
        return ExpertPlacement(cpu_layers=least)
    return ExpertPlacement(brings=True)


Moves = tuple[tuple[int, int], ...]  # each (expert slot, expert)


@frozen
class Residents:
    """The expert in each expert slot of the device, and how much each expert was used.

    Experts are numbered over all layers: those of layer 0 first, then those of layer 1, and so on.
    """

    uses: tuple[int, ...] = ()  # by expert
    expert_slots: tuple[int, ...] = ()  # by slot, the expert that has it


def make_residents(experts: int, expert_slots: int) -> Residents:
    """Return the residents before anything is known: every layer has the same share of the slots."""
    return Residents(
        (0,) * experts, tuple(expert_slot * experts // expert_slots for expert_slot in range(expert_slots))
    )


def choose_moves(residents: Residents, counts: Sequence[int]) -> tuple[Residents, Moves]:
    """Return the residents after a report, and the experts that are to be copied to the device.

    counts: by expert, the steps since the last report that needed it. The most used experts without a slot take the
    slots of the least used ones. Among equals the smaller number comes first.
    """
    uses = tuple(
        before - before // FADE_DIVISOR + USE_UNIT * count for before, count in zip(residents.uses, counts, strict=True)
    )
    expert_slots = list(residents.expert_slots)
    resident = set(residents.expert_slots)
    absent = (expert for expert in range(len(uses)) if expert not in resident)
    coming = nsmallest(MAX_MOVES, absent, lambda expert: (-uses[expert], expert))
    leaving = nsmallest(
        MAX_MOVES, range(len(expert_slots)), lambda expert_slot: (uses[expert_slots[expert_slot]], expert_slot)
    )
    moves = list[tuple[int, int]]()
    for expert_slot, expert in zip(leaving, coming, strict=False):
        uses_here = uses[expert_slots[expert_slot]]
        if uses[expert] <= uses_here + uses_here // 4 + USE_UNIT:
            break
        expert_slots[expert_slot] = expert
        moves.append((expert_slot, expert))
    return Residents(uses, tuple(expert_slots)), tuple(moves)
