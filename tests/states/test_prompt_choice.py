"""The choice among prompts: which one goes first, and which share a launch of the prompt lane."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.all import EffectRequest
from effects.ids import RequestId, SlotId
from effects.prefill import RunPrefill, group_prefills
from effects.residency import LoadModel
from states.lane import FORWARDS, Lane
from states.prompt_choice import MAX_OVERTAKES, choose_other_effect, choose_prompts
from states.request_states import Prefilling, ProposesNothing, SlotLease, State
from tests.states.builders import DRAFT, PLAIN, a, prefilled

LANES = evolve(PLAIN, chunk=256, block_size=64, prompt_lane_min_rows=16)


def wait_with(*rows: int) -> tuple[list[EffectRequest], dict[RequestId, State]]:
    """Prompts that lack so many rows, in order of arrival, and their requests: 1, 2, 3 and so on."""
    waiting = list[EffectRequest]()
    states = dict[RequestId, State]()
    for number, count in enumerate(rows, 1):
        prompt = evolve(a(Prefilling, prefilled(DRAFT)).prompt, tokens=(7,) * (count + 1))
        states[RequestId(number)] = Prefilling(SlotLease(SlotId(number)), prompt, ProposesNothing(""))
        waiting.append(EffectRequest(RequestId(number), RunPrefill(SlotId(number), 0, count)))
    return waiting, states


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ((200, 120, 100), [(3, 100), (2, 120), (1, 200)]),  # the shortest first; two of them share a forward
        ((100, 200, 210, 220), [(1, 100), (2, 200)]),  # there is no third forward
        ((100, 120, 300), [(1, 100), (2, 120)]),  # a prompt that needs more than a chunk ends the list, uncut
        ((256, 256, 256), [(1, 256), (2, 256)]),  # a chunk each
        ((300, 400), [(1, 300)]),  # the first one needs more than a chunk, so it has the launch to itself
        ((900, 1000), [(1, 512)]),  # ... and two chunks of it are computed
    ],
)
def test_a_launch_has_some_chunks_of_one_prompt_or_the_next_rows_of_several(
    rows: tuple[int, ...], chosen: list[tuple[int, int]]
) -> None:
    waiting, states = wait_with(*rows)
    _, launched = choose_prompts(Lane(), waiting, states, LANES)
    effects = [one.effect for one in launched if isinstance(one.effect, RunPrefill)]
    assert [(one.request, effect.stop) for one, effect in zip(launched, effects, strict=True)] == chosen
    if len(effects) > 1:
        assert len(group_prefills(effects, LANES.chunk)) <= FORWARDS


def test_the_prompt_that_waited_longest_ends_the_list_when_it_is_its_turn_and_it_does_not_fit() -> None:
    waiting, states = wait_with(300, 50, 60, 70)
    lane, launched = choose_prompts(Lane(), waiting, states, LANES)
    assert [one.request for one in launched] == [2, 3]
    assert lane.overtakes == MAX_OVERTAKES
    lane, launched = choose_prompts(lane, [waiting[0], waiting[3]], states, LANES)
    assert launched == (waiting[0],), "all of it: its rows are less than two chunks"
    assert lane.overtakes == 0


def test_an_effect_that_is_no_prompt_goes_when_it_is_first_in_line() -> None:
    (long, short), states = wait_with(900, 30)
    load = EffectRequest(RequestId(9), LoadModel("draft"))
    lane = evolve(Lane(), overtakes=1)
    assert choose_other_effect(lane, [load, long, short], states) == (lane, load), "nothing overtakes it"
    assert choose_other_effect(lane, [long, load], states)[1] == long, "it overtakes nothing"
    assert choose_other_effect(lane, [long, load, short], states)[1] == short
