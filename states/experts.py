"""Experts that the device has no room for: whether the host computes them, and which of them are on the device.

`choose_expert_placement` decides at the start, once for all rows. The rest of this module is about experts that are
brought to the device: it has those that recent steps have needed most, and host memory has all of them.

An expert that is needed and is not on the device is copied there for that step alone. So a slot on the device saves one
copy for every step that needs its expert. Uses are therefore counted in steps and not in rows. They fade, because
what people talk about changes. And an expert has to be used clearly more often to take a slot, because a move costs a
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


@frozen
class ExpertPrices:
    """Measured nanoseconds, of one decoded row.

    compute_ns: the host runs the row through its experts of one layer, with the row's way there and back. bring_ns: the
    weights of one expert are copied to the device.
    """

    compute_ns: int
    bring_ns: int


@frozen
class ExpertPlacement:
    """The place of experts that the device has no room for.

    cpu_layers: the host computes the experts of this many first layers. brings: host memory has all experts, and those
    that are chosen are brought to the device.
    """

    cpu_layers: int = 0
    brings: bool = False


def choose_expert_placement(prices: ExpertPrices, least: int, chosen: int) -> ExpertPlacement:
    """Return what is sooner for a decoded row: to compute the experts of `least` layers, or to bring them.

    least: layers whose experts have to leave the device, so that the others fit. chosen: experts of a row.

    The time is linear in the number of layers that the host computes, so a mixture of both ways is never quicker than
    the better one. The device has room for the same share of experts either way. So as many experts are brought, if
    all are chosen alike, as the host would compute, and the prices of one layer decide.
    """
    if prices.compute_ns < chosen * prices.bring_ns:
        return ExpertPlacement(cpu_layers=least)
    return ExpertPlacement(brings=True)


Moves = tuple[tuple[int, int], ...]  # each (expert slot, expert)


@frozen
class Residents:
    """The expert in each slot of the device, and how much each expert was used. All layers are numbered through."""

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
