"""The outcomes that a launch reports at once: one event, in which every request has the transition of its own."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, RequestId
from effects.lookup import PrefixMissed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.stream import EmitTokens
from engine.core.event_loop import group_outcomes
from states.events import EffectOutcome, ForLaunch, ForRequest, Submitted, list_request_events
from states.invariants import check_world
from states.machine import IllegalEvent
from states.world import Output, World, make_world
from tests.states.builders import ONE, PLAIN, THREE, TWO, a_job, advance

SETTINGS = evolve(PLAIN, slots=2, chunk=16)


def decoding() -> World:
    """Two requests decode in one launch, and a third one waits for a slot."""
    world = make_world(SETTINGS)
    for request in (ONE, TWO, THREE):
        world, _ = advance(world, ForRequest(request, Submitted(a_job(salt=str(request)))))
    while [
        effect_request.request
        for effect_request in world.lanes[MAIN].running
        if isinstance(effect_request.effect, RunDecode)
    ] != [ONE, TWO]:
        effect_request = world.lanes[MAIN].running[0]
        done = (
            PrefillAdvanced(effect_request.effect.stop)
            if isinstance(effect_request.effect, RunPrefill)
            else Decoded((5,))
        )
        world, _ = advance(world, ForRequest(effect_request.request, done))
    return world


def both(first: Decoded, second: Decoded) -> ForLaunch:
    return ForLaunch((EffectOutcome(ONE, first), EffectOutcome(TWO, second)))


def one_by_one(world: World, event: ForLaunch) -> tuple[World, tuple[Output, ...]]:
    outputs = tuple[Output, ...]()
    for one in event.outcomes:
        world, outs = advance(world, ForRequest(one.request, one.outcome))
        outputs += outs
    return world, outputs


def emitted(outs: tuple[Output, ...]) -> list[EffectRequest]:
    return [out for out in outs if isinstance(out, EffectRequest) and isinstance(out.effect, EmitTokens)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Decoded((7,), more=True), Decoded((8,), more=True)),
        (Decoded((7,)), Decoded((8,), more=True)),
        (Decoded((7,)), Decoded((8,))),
    ],
)
def test_outcomes_that_come_at_once_do_what_they_do_one_after_the_other(first: Decoded, second: Decoded) -> None:
    before = decoding()
    together, outs = advance(before, both(first, second))
    check_world(together)
    apart, expected = one_by_one(before, both(first, second))
    assert together.requests == apart.requests
    assert together.rates == apart.rates
    assert emitted(outs) == emitted(expected)
    if first.more and second.more:
        assert (together, outs) == (apart, expected), "nothing waits for the lane"


def test_slots_are_given_once_every_outcome_is_taken() -> None:
    world, outs = advance(decoding(), both(Decoded((0,)), Decoded((8,), more=True)))  # 0 ends the first answer
    check_world(world)
    assert [out.request for out in emitted(outs)] == [ONE, TWO]
    first_of_third = next(at for at, out in enumerate(outs) if isinstance(out, EffectRequest) and out.request == THREE)
    second_told = outs.index(EffectRequest(TWO, EmitTokens((8,))))
    assert second_told < first_of_third


def test_the_next_launch_has_everybody() -> None:
    _, outs = advance(decoding(), both(Decoded((7,)), Decoded((8,))))
    (launch,) = [out for out in outs if isinstance(out, Launch)]
    assert [(effect_request.request, type(effect_request.effect)) for effect_request in launch.effect_requests] == [
        (ONE, RunDecode),
        (TWO, RunDecode),
    ]


def test_an_outcome_that_nothing_awaits_is_a_bug() -> None:
    with pytest.raises(IllegalEvent, match="awaits"):
        advance(
            decoding(), ForLaunch((EffectOutcome(ONE, Decoded((7,), more=True)), EffectOutcome(THREE, Decoded((8,)))))
        )


def test_two_outcomes_of_one_request_are_two_events() -> None:
    with pytest.raises(ValueError, match="two events"):
        ForLaunch((EffectOutcome(ONE, Decoded((7,))), EffectOutcome(ONE, Decoded((8,)))))
    first, second, third = Decoded((7,), 2, more=True), Decoded((8,), 2, more=True), Decoded((9,), 2)
    assert list(group_outcomes([(ONE, first), (TWO, second), (ONE, third)])) == [
        both(first, second),
        ForRequest(ONE, third),
    ]
    assert list(group_outcomes([])) == []


def test_what_happened_to_requests_is_listed_in_order() -> None:
    event = both(Decoded((7,)), Decoded((8,)))
    assert list_request_events(event) == ((ONE, Decoded((7,))), (TWO, Decoded((8,))))
    assert list_request_events(ForRequest(RequestId(9), PrefixMissed("x"))) == ((9, PrefixMissed("x")),)
