"""Mixed launches of several forwards: who goes along, who joins, who waits, and what ends them."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, SlotId
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import LoadModel
from effects.stream import StopLaunch
from states import lane, launch_choice
from states.events import EffectOutcome, ForRequest, Submitted
from states.invariants import check_world
from states.lane import Lane
from states.rates import Rates, TimedStep
from states.request_states import MayPropose, Speculating, State
from states.settings import Settings
from states.speculation_plan import Plan
from states.world import Output, World, make_world
from states.world import advance as advance_world
from tests.states.builders import ONE, PLAIN, TWO, a_job

ALONG = evolve(PLAIN, chunk=64, block_size=4, mixed_rows=16, mixed_launches=True, slots=4, max_context=200)
STATEFUL = evolve(ALONG, stateful=True, commits_per_segment=True)
COPYING = evolve(ALONG, max_copied=7, batch_rows=64)
TIMED = Rates(
    decode=(TimedStep(0, 1, 0, 1000, 0),),
    copy_times=(TimedStep(0, 1, 4, 1100, 1000), TimedStep(0, 1, 8, 1200, 1000)),
)
THREE = RequestId(3)
MODELS = make_world(COPYING).models


def a_step(request: int, steps: int = 9) -> EffectRequest:
    return EffectRequest(RequestId(request), RunDecode(SlotId(request), 20, 7, steps=steps))


def a_prompt(request: int, start: int, stop: int, **changes: Any) -> EffectRequest:
    return EffectRequest(RequestId(request), RunPrefill(SlotId(request), start, stop, **changes))


def submitted(request: int, prompt: tuple[int, ...]) -> ForRequest:
    return ForRequest(RequestId(request), Submitted(a_job(prompt=prompt, max_tokens=30)))


def advance(world: World, happened: ForRequest) -> tuple[World, tuple[Output, ...]]:
    world, outs = advance_world(world, happened)
    check_world(world)
    return world, outs


def running(*members: EffectRequest, waiting: tuple[EffectRequest, ...] = ()) -> Lane:
    plan = Plan((0,) * sum(isinstance(one.effect, RunDecode) for one in members))
    return Lane(waiting, members, last_was_decode=True, member_count=len(members), plan=plan, runs_unattended=True)


def test_a_prompt_goes_along_with_steps_that_run_unattended() -> None:
    before = Lane((a_prompt(1, 4, 68, checkpoint=True), a_step(2), a_step(3, steps=1)))
    after_, _, chosen = launch_choice.choose_launch(before, {}, ALONG, {}, Rates())
    along = a_prompt(1, 4, 4 + 2 * 14, forward_rows=16)
    assert chosen == Launch((a_step(2), a_step(3, steps=1), along)), "two forwards of 14 rows beside two decode rows"
    assert after_.runs_unattended
    assert lane.count_rows_taken(after_) == 28 + lane.ROWS_PER_END
    assert after_.running[-1] == along


def test_where_no_step_may_go_on_the_launch_has_one_forward() -> None:
    before = Lane((a_prompt(1, 4, 68), a_step(2, steps=1)))
    after_, _, _ = launch_choice.choose_launch(before, {}, ALONG, {}, Rates())
    assert not after_.runs_unattended


def copying_step(request: int, matched: int, settings: Settings) -> tuple[EffectRequest, State]:
    """Return a decode step of a request that may copy, and its state. matched: as in `Decoded`, of its last outcome."""
    world, _ = advance(make_world(settings), submitted(request, (1,)))
    state = world.requests[RequestId(request)]
    assert isinstance(state, Speculating)
    assert isinstance(state.speculation, MayPropose)
    control = evolve(state.speculation.control, matched=matched)
    return a_step(request), evolve(state, speculation=evolve(state.speculation, control=control))


def test_where_text_may_be_copied_steps_beside_prompts_have_rules_and_go_on() -> None:
    """A match ends their launch, so it need not be short, and prompts may join it."""
    step, state = copying_step(2, 0, COPYING)
    before = Lane((a_prompt(1, 4, 68), step))
    after, _, chosen = launch_choice.choose_launch(before, {}, COPYING, {TWO: state}, TIMED)
    assert isinstance(chosen, Launch)
    [launched] = [one.effect for one in chosen.effect_requests if isinstance(one.effect, RunDecode)]
    assert launched.steps == 9
    assert launched.copying is not None
    assert any(launched.copying.counts)
    assert after.runs_unattended
    assert after.turn == "prompts"
    done = lane.record_outcome(after, EffectOutcome(ONE, PrefillAdvanced(34)), ends_together=False)
    assert lane.can_join(evolve(done, waiting=(a_prompt(4, 0, 8),)), COPYING)


def test_copies_and_prompts_take_turns_while_both_wait() -> None:
    """Of a launch that copies beside a waiting prompt, only one step is taken: the prompt stops it."""
    step, state = copying_step(2, 30, COPYING)
    lane_ = Lane((a_prompt(1, 4, 68), step))
    turns = list[str]()
    for _ in range(4):
        after, _, chosen = launch_choice.choose_launch(lane_, MODELS, COPYING, {TWO: state}, TIMED)
        assert isinstance(chosen, Launch)
        [copying] = [one.effect.copying for one in chosen.effect_requests if isinstance(one.effect, RunDecode)]
        assert copying is not None
        turns.append(after.turn)
        assert (len(chosen.effect_requests) == 1) == (after.turn == "copies")
        if after.turn == "copies":
            assert after.waiting == lane_.waiting[:1]
            assert not lane.can_join(after, COPYING)
            assert lane.is_blocking(after)
        lane_ = evolve(after, running=(), waiting=lane_.waiting)
    assert turns == ["prompts", "copies", "prompts", "copies"]


def test_without_a_match_prompts_go_along_in_every_launch() -> None:
    step, state = copying_step(2, 0, COPYING)
    before = Lane((a_prompt(1, 4, 68), step), turn="prompts")
    after, _, _ = launch_choice.choose_launch(before, {}, COPYING, {TWO: state}, TIMED)
    assert after.turn == "prompts"


def test_prompts_wait_for_the_one_that_goes_along_and_nothing_stops() -> None:
    busy = running(a_step(1), a_prompt(2, 0, 28, forward_rows=16), waiting=(a_prompt(3, 0, 8),))
    assert not lane.can_join(busy, ALONG)
    assert not lane.is_blocking(busy)
    assert not lane.can_join(busy, STATEFUL)
    done = lane.record_outcome(busy, EffectOutcome(TWO, PrefillAdvanced(28)), ends_together=False)
    assert lane.can_join(done, ALONG)
    joined, joining = launch_choice.join_launch(done, {}, ALONG, Rates())
    assert joining == (a_prompt(3, 0, 8, forward_rows=16),)
    assert joined.running == (a_step(1), *joining)
    assert joined.waiting == ()


def test_decode_steps_join_while_prompts_wait() -> None:
    waiting = (a_prompt(3, 0, 8), a_step(4))
    busy = running(a_step(1), a_prompt(2, 0, 28, forward_rows=16), waiting=waiting)
    assert lane.can_join(busy, ALONG)
    joined, joining = launch_choice.join_launch(busy, {}, ALONG, Rates())
    assert joining == (a_step(4),)
    assert joined.waiting == waiting[:1]
    assert not lane.is_blocking(joined)


def test_a_decode_step_and_a_prompt_join_together_the_step_first() -> None:
    busy = running(a_step(1), waiting=(a_prompt(3, 0, 40), a_step(4)))
    _, joining = launch_choice.join_launch(busy, {}, ALONG, Rates())
    assert joining == (a_step(4), a_prompt(3, 0, 28, forward_rows=16))


@pytest.mark.parametrize(
    "other",
    [
        a_prompt(3, 8, 16, keeps_state_first=True),
        a_prompt(3, 8, 16, logprobs=1),
        EffectRequest(THREE, LoadModel("draft")),
    ],
    ids=["its state is kept first", "its logprobs are asked for", "a model is loaded"],
)
@pytest.mark.parametrize("goes_along", [True, False])
def test_what_cannot_go_along_ends_the_launch(other: EffectRequest, goes_along: bool) -> None:
    members = (a_step(1), a_prompt(2, 0, 28, forward_rows=16)) if goes_along else (a_step(1),)
    busy = running(*members, waiting=(a_prompt(4, 0, 8), other))
    assert not lane.can_join(busy, ALONG)
    assert lane.is_blocking(busy)


def test_more_steps_than_a_batch_has_room_for_end_the_launch() -> None:
    busy = running(a_step(1), a_prompt(2, 0, 28, forward_rows=16), waiting=(a_step(3),))
    assert lane.can_join(busy, evolve(ALONG, batch_rows=2)), "the prompt's rows are no decode rows"
    assert not lane.can_join(busy, evolve(ALONG, batch_rows=1))
    assert lane.is_blocking(busy)


def test_states_that_only_one_prompt_can_move_in_a_forward_let_one_go_along_at_a_time() -> None:
    alone = evolve(STATEFUL, commits_per_segment=False)
    waiting = (a_step(1), a_prompt(2, 0, 4), a_prompt(3, 0, 8))
    _, _, chosen = launch_choice.choose_launch(Lane(waiting), {}, alone, {}, Rates())
    assert chosen == Launch((a_step(1), a_prompt(2, 0, 4, forward_rows=16)))
    _, _, chosen = launch_choice.choose_launch(Lane(waiting), {}, STATEFUL, {}, Rates())
    assert chosen == Launch((a_step(1), a_prompt(2, 0, 4, forward_rows=16), a_prompt(3, 0, 8, forward_rows=16)))
    busy = running(a_step(1), a_prompt(2, 0, 4, forward_rows=16), waiting=(a_prompt(3, 0, 8),))
    assert not lane.can_join(busy, alone)
    assert lane.can_join(busy, STATEFUL)


def test_prompts_join_the_launch_that_goes_on_one_after_the_other_and_nothing_is_stopped() -> None:
    """Also the first decode step of a prompt that went along."""
    prompt = tuple(range(40))
    world, _ = advance(make_world(STATEFUL), submitted(ONE, (1,)))
    world, outs = advance(world, submitted(TWO, prompt))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    assert launch.joins
    [along] = [one.effect for one in launch.effect_requests]
    assert isinstance(along, RunPrefill)
    assert (along.start, along.stop, along.forward_rows) == (0, 30, 16)
    world, outs = advance(world, submitted(THREE, (*range(50, 70),)))
    assert not [out for out in outs if isinstance(out, Launch)], "it waits for the one that goes along"
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(15, more=True)))
    assert not [out for out in outs if isinstance(out, Launch) or isinstance(out.effect, StopLaunch)]
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(30)))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    assert launch.joins
    assert [effect for one in launch.effect_requests if isinstance(effect := one.effect, RunPrefill)] == [
        RunPrefill(along.slot, 30, 39, forward_rows=16),
        RunPrefill(SlotId(2), 0, 19, forward_rows=16),
    ], "the fewest rows first"
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(39)))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    assert launch.joins
    assert [type(one.effect) for one in launch.effect_requests] == [RunDecode]
    world, outs = advance(world, ForRequest(ONE, Decoded((7,), more=True)))
    assert not [out for out in outs if isinstance(out, Launch) or isinstance(out.effect, StopLaunch)]


def test_a_prompt_that_nothing_waits_for_gets_several_chunks_behind_the_first_one() -> None:
    """While the first chunk is computed, followers say which rows they wait for."""
    settings = evolve(ALONG, stateful=True, commits_per_segment=True, state_checkpoints=2, chunks_per_prefill=3)
    settings = evolve(settings, chunk=8, max_context=200)
    world, outs = advance(make_world(settings), submitted(ONE, tuple(range(80))))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    [first] = [one.effect for one in launch.effect_requests]
    assert isinstance(first, RunPrefill)
    assert (first.start, first.stop) == (0, 8)
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(8)))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    [second] = [one.effect for one in launch.effect_requests]
    assert isinstance(second, RunPrefill)
    assert (second.start, second.stop) == (8, 32)
    world, outs = advance(world, submitted(TWO, (7,)))
    assert EffectRequest(ONE, StopLaunch()) in outs, "a decode step waits"
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(16)))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    assert [type(one.effect) for one in launch.effect_requests] == [RunDecode, RunPrefill]


def test_where_several_prompts_with_positional_state_wait_each_gets_a_chunk() -> None:
    before = Lane((a_prompt(1, 0, 192), a_prompt(2, 0, 150)))
    after, _, chosen = launch_choice.choose_launch(before, {}, STATEFUL, {}, Rates())
    assert chosen == Launch((a_prompt(1, 0, 64),))
    assert not after.runs_unattended
    alone, _, chosen = launch_choice.choose_launch(Lane((a_prompt(1, 0, 192),)), {}, STATEFUL, {}, Rates())
    assert chosen == Launch((a_prompt(1, 0, 192),))
    assert alone.runs_unattended


def test_prompts_without_decode_steps_share_a_launch_of_two_forwards() -> None:
    before = Lane((a_prompt(1, 0, 40), a_prompt(2, 0, 24), a_prompt(3, 0, 60)))
    _, _, chosen = launch_choice.choose_launch(before, {}, ALONG, {}, Rates())
    assert chosen == Launch(before.waiting), "64 rows, and 60"
    counted = Lane((*before.waiting, a_prompt(4, 0, 9, logprobs=1)))
    _, _, chosen = launch_choice.choose_launch(counted, {}, ALONG, {}, Rates())
    assert chosen == Launch(before.waiting[:1]), "a prompt that may not go along shares no launch"


def test_several_prompts_go_along_with_decode_steps_as_far_as_two_forwards_have_room() -> None:
    """Two forwards of 16 rows have room for 30 rows behind one decode row. A prompt's end may take two."""
    waiting = (a_prompt(1, 0, 12), a_prompt(2, 0, 8), a_prompt(3, 0, 60), a_prompt(4, 0, 5), a_step(5))
    after, _, chosen = launch_choice.choose_launch(Lane(waiting), {}, ALONG, {}, Rates())
    rows = (
        a_prompt(1, 0, 12, forward_rows=16),
        a_prompt(2, 0, 8, forward_rows=16),
        a_prompt(3, 0, 6, forward_rows=16),
    )
    assert chosen == Launch((a_step(5), *rows))
    assert after.waiting == waiting[3:4]
    assert not lane.can_join(after, ALONG)
    assert not lane.is_blocking(after)


@pytest.mark.parametrize("settings", [ALONG, STATEFUL])
@pytest.mark.parametrize("ended", [1, 2, 3])
def test_ends_of_prompts_in_front_leave_no_rows_that_two_forwards_have_no_room_for(
    settings: Settings, ended: int
) -> None:
    """The prompts in front end in the first forward. Each may keep its last row there, and decodes in the second."""
    waiting = (*(a_prompt(one, 0, 3) for one in range(1, ended + 1)), a_prompt(4, 0, 60), a_step(5))
    _, _, chosen = launch_choice.choose_launch(Lane(waiting), {}, settings, {}, Rates())
    assert isinstance(chosen, Launch)
    *_, last = (one.effect for one in chosen.effect_requests)
    assert isinstance(last, RunPrefill)
    first_forward = 16 - 1 - ended * (3 + 1)
    second_forward = 16 - 1 - ended
    assert last.stop <= first_forward + second_forward
    assert last.stop > second_forward, "both have rows of it"


def test_the_shortest_prompts_go_along_first() -> None:
    world, _ = advance(make_world(ALONG), submitted(ONE, (1,)))
    world, _ = advance(world, submitted(TWO, tuple(range(100))))
    for number, length in ((3, 30), (4, 20)):
        world, _ = advance(world, submitted(number, tuple(range(100 * number, 100 * number + length))))
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(30)))
    [launch] = [out for out in outs if isinstance(out, Launch)]
    found = [(one.request, one.effect.stop - one.effect.start) for one in launch.effect_requests]
    assert found == [(RequestId(4), 19), (THREE, 9)]


def test_a_prompt_that_was_overtaken_twice_goes_along_first() -> None:
    waiting = (a_prompt(2, 0, 60), a_prompt(3, 0, 8), a_prompt(4, 0, 5), a_step(5))
    after, _, chosen = launch_choice.choose_launch(Lane(waiting, overtakes=2), {}, ALONG, {}, Rates())
    assert chosen == Launch((a_step(5), a_prompt(2, 0, 30, forward_rows=16)))
    assert after.overtakes == 0


@pytest.mark.parametrize(
    ("target_ns", "start", "rows"), [(0, 0, 64), (427, 0, 64), (426, 0, 32), (50, 0, 16), (427, 2000, 32)]
)
def test_the_rows_of_a_forward_take_no_longer_than_one_and_a_half_latency_targets(
    target_ns: int, start: int, rows: int
) -> None:
    """A row takes 10 ns up to row 1,024 and 20 ns behind it. A quarter of a chunk is the least."""
    settings = evolve(ALONG, mixed_rows=64, latency_target_ns=target_ns, max_context=4000)
    waiting = (a_prompt(1, start, start + 300), a_step(2))
    _, _, chosen = launch_choice.choose_launch(Lane(waiting), {}, settings, {}, Rates((10, 20)))
    assert chosen == Launch((a_step(2), a_prompt(1, start, start + 2 * (rows - 1), forward_rows=rows)))


def test_rows_that_would_be_cut_to_less_than_a_block_wait_for_the_next_forward() -> None:
    busy = running(a_step(1), a_prompt(2, 0, 25, forward_rows=16), waiting=(a_prompt(3, 0, 8), a_step(4)))
    _, joining = launch_choice.join_launch(busy, {}, ALONG, Rates())
    assert joining == (a_step(4),), "the room is one row"
    shorter = evolve(busy, running=(a_step(1), a_prompt(2, 0, 22, forward_rows=16)))
    _, joining = launch_choice.join_launch(shorter, {}, ALONG, Rates())
    assert joining == (a_step(4), a_prompt(3, 0, 4, forward_rows=16))


@pytest.mark.parametrize("changes", [{"mixed_rows": 0}, {"max_proposals": 4}])
def test_settings_in_which_nothing_could_go_along_are_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match="goes along"):
        evolve(ALONG, **changes)
