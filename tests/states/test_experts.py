"""Tests of which experts are on the device: the most used ones, moved only for a good reason, and decided by the
reported counts alone.
"""

from __future__ import annotations

import pytest

from effects.all import EffectRequest
from effects.experts import MoveExperts
from effects.ids import ENGINE
from states.events import ExpertsUsed, ForEngine
from states.experts import (
    MAX_MOVES,
    USE_UNIT,
    ExpertPlacement,
    ExpertPrices,
    Residents,
    choose_expert_placement,
    choose_moves,
    make_residents,
)
from states.invariants import check_world
from states.machine import IllegalEvent
from states.settings import Settings
from states.world import make_world as world_of
from tests.states.builders import advance


@pytest.mark.parametrize(
    ("compute_ns", "bring_ns", "found"),
    [
        (700, 100, ExpertPlacement(cpu_layers=5)),
        (799, 100, ExpertPlacement(cpu_layers=5)),
        (800, 100, ExpertPlacement(brings=True)),  # eight of them are brought in this time
        (801, 100, ExpertPlacement(brings=True)),
    ],
)
def test_the_sooner_way_is_taken_for_all_layers(compute_ns: int, bring_ns: int, found: ExpertPlacement) -> None:
    assert choose_expert_placement(ExpertPrices(compute_ns, bring_ns), 5, 8) == found


def test_no_mixture_of_both_ways_is_quicker_than_the_better_one() -> None:
    """The prices are counted out for a device with room for 30 of 48 layers of 16 experts, two for each row."""
    layers, count, chosen, room = 48, 16, 2, 30 * 16
    for prices in (ExpertPrices(50, 20), ExpertPrices(50, 30), ExpertPrices(50, 25)):
        times = list[float]()
        for computed in range(layers - 30 + 1):
            rest = (layers - computed) * count
            brought = (layers - computed) * chosen * (1 - min(1, room / rest))
            times.append(computed * prices.compute_ns + brought * prices.bring_ns)
        assert min(times) >= min(times[0], times[-1]) - 1e-9
        found = choose_expert_placement(prices, layers - 30, chosen)
        assert times[0 if found.brings else -1] == pytest.approx(min(times))


def test_before_anything_is_known_every_layer_has_as_many() -> None:
    assert make_residents(12, 4) == Residents((0,) * 12, (0, 3, 6, 9))
    assert make_residents(3, 3).expert_slots == (0, 1, 2)
    assert make_residents(0, 0) == Residents()


def test_the_most_used_take_the_places_of_the_least_used() -> None:
    residents, moves = choose_moves(Residents((0,) * 6, (0, 1)), (1, 9, 0, 30, 20, 0))
    assert moves == ((0, 3), (1, 4))
    assert residents.expert_slots == (3, 4)
    assert residents.uses == tuple(USE_UNIT * count for count in (1, 9, 0, 30, 20, 0))


@pytest.mark.parametrize(
    ("counts", "moves"),
    [
        ((8, 10), ()),  # within a quarter and one use more
        ((8, 11), ()),
        ((8, 12), ((0, 1),)),
        ((0, 1), ()),  # once is chance
        ((0, 2), ((0, 1),)),
        ((5, 5), ()),
    ],
)
def test_nobody_leaves_for_a_little_more(counts: tuple[int, int], moves: tuple[tuple[int, int], ...]) -> None:
    assert choose_moves(Residents((0, 0), (0,)), counts)[1] == moves


def test_of_equals_the_lower_number_comes_and_the_lower_place_is_left() -> None:
    assert choose_moves(Residents((0,) * 5, (0, 4)), (0, 7, 7, 7, 0))[1] == ((0, 1), (1, 2))


def test_uses_fade_so_those_of_another_subject_come_in() -> None:
    residents, reports = Residents((USE_UNIT * 256, 0), (0,)), 0
    while residents.expert_slots == (0,):
        residents, _ = choose_moves(residents, (0, 32))
        reports += 1
    assert reports == 7


def test_one_report_moves_so_many_at_most() -> None:
    residents, moves = choose_moves(make_residents(400, 200), tuple(9 * (number % 2) for number in range(400)))
    assert len(moves) == MAX_MOVES
    assert len({*residents.expert_slots}) == 200


def test_the_world_tells_the_device_who_moves_and_only_that() -> None:
    world = world_of(Settings(experts=4, expert_slots=1))
    check_world(world)
    world, outs = advance(world, ForEngine(ExpertsUsed((0, 0, 9, 0))))
    assert outs == (EffectRequest(ENGINE, MoveExperts(((0, 2),))),)
    check_world(world)
    assert advance(world, ForEngine(ExpertsUsed((0, 0, 9, 0))))[1] == ()
    for counts in ((1, 2), (), (1, 1, 1, -1)):
        with pytest.raises(IllegalEvent, match=f"{len(counts)} counts of 4 experts"):
            advance(world, ForEngine(ExpertsUsed(counts)))


@pytest.mark.parametrize("changes", [{"experts": 4, "expert_slots": 5}, {"experts": -1}, {"experts": (1 << 16) + 1}])
def test_more_places_than_experts_or_more_than_any_model_has_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="impossible settings"):
        Settings(**changes)
