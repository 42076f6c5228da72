"""Followers: which waiting requests wait for rows of a prompt that is being computed, and what becomes of them."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.all import Effect, EffectRequest
from effects.compression import Compression
from effects.ids import MAIN, CheckpointId, DeviceFailed, RequestId, SlotId, Tokens
from effects.lookup import PrefixMissed
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.stream import CloseStream, StopLaunch
from states import followers
from states.events import Cancelled, Event, ForEngine, ForRequest, SlotsLost, Submitted
from states.invariants import check_world
from states.rates import Rates
from states.request_states import (
    Compressing,
    Followed,
    LoadingScorer,
    LookingUp,
    Prefilling,
    Restoring,
    Speculating,
    State,
    Waiting,
)
from states.settings import DecisionContext, Settings
from states.slots import Follow, Slot
from states.world import Output, World, advance, make_world
from tests.states.builders import (
    ONE,
    PLAIN,
    PROMPT,
    STATEFUL,
    THREE,
    TWO,
    a,
    a_house,
    a_job,
    a_restoring,
    a_waiting,
    answering,
    some,
    waiting_for,
)

HEAD = PROMPT[:16]
FIRST: Tokens = (*HEAD, 1, 1, 1, 1, 1)
SECOND: Tokens = (*HEAD, 2, 2, 2, 2, 2)
GONE = Cancelled("client_gone")
ROOMY = evolve(PLAIN, slots=4)
# A prompt that nothing waits for has several chunks in one launch.
SPANNING = evolve(
    STATEFUL, slots=4, store=False, chunk=4, chunks_per_prefill=8, mixed_rows=16, mixed_launches=True, max_context=200
)


def follow(
    state: State,
    own_rows: int = 0,
    prompt: Tokens = SECOND,
    settings: Settings = ROOMY,
    rates: Rates | None = None,
    *,
    launched: RunPrefill | None = None,
) -> Follow | None:
    """Return the leader of request ONE, which waits with this prompt, while request TWO is in this state.

    launched: the prefill of request TWO that runs.
    """
    running = {} if launched is None else {TWO: launched}
    requests = {**waiting_for(a_job(prompt=prompt)), TWO: state}
    context = DecisionContext(settings, rates or Rates())
    return followers.choose_leader(
        a_house(Slot(holder=TWO), Slot()), ONE, own_rows, requests, context, launched=running
    )


def rows_of(found: Follow | None) -> int | None:
    return None if found is None else found.awaited_rows


def test_a_prompt_that_is_computed_is_followed_as_far_as_both_are_equal() -> None:
    leader = some(job=a_job(prompt=FIRST), prompt=FIRST)
    assert rows_of(follow(a(Prefilling, leader))) == 16
    assert rows_of(follow(a(LookingUp, leader))) == 16
    assert rows_of(follow(a(Prefilling, leader), prompt=FIRST)) == 20, "all but the last token, in whole blocks"
    assert follow(a(Prefilling, leader), prompt=(9, *SECOND[1:])) is None


def test_rows_that_are_there_are_not_waited_for() -> None:
    leader = some(job=a_job(prompt=FIRST), prompt=FIRST, valid=16)
    assert follow(a(Prefilling, leader)) is None
    behind = some(job=a_job(prompt=FIRST), prompt=FIRST, valid=8)
    assert rows_of(follow(a(Prefilling, behind), own_rows=8)) == 16
    assert follow(a(Prefilling, behind), own_rows=16) is None


@pytest.mark.parametrize("state", [Speculating, Compressing])
def test_only_a_prompt_that_is_certain_and_not_complete_is_followed(state: type) -> None:
    leader = some(job=a_job(prompt=FIRST), prompt=FIRST)
    held = a(state, answering(job=a_job(prompt=FIRST), prompt=FIRST) if state is Speculating else leader)
    assert follow(held, prompt=(*FIRST, 7, 7, 7, 7, 7)) is None


def test_other_salts_and_prompts_whose_logprobs_are_asked_for_are_not_followed() -> None:
    assert follow(a(Prefilling, some(job=a_job(prompt=FIRST, salt="b"), prompt=FIRST))) is None
    assert follow(a(Prefilling, some(job=a_job(prompt=FIRST, prompt_logprobs=0), prompt=FIRST))) is None


def test_what_would_be_compressed_neither_leads_nor_follows() -> None:
    """Missing rows decide: 20 of each prompt at first, and 4 once the common ones are there."""
    scorer = evolve(ROOMY, scorer_max_tokens=1000)
    never, perhaps = Compression("off"), Compression("auto", threshold=4)
    leader = some(job=a_job(prompt=FIRST, compression=never), prompt=FIRST)
    requests = {TWO: a(LookingUp, leader), ONE: a_waiting(a_job(prompt=SECOND, compression=never))}
    house, context = a_house(Slot(holder=TWO), Slot()), DecisionContext(scorer)
    assert followers.choose_leader(house, ONE, 0, requests, context, launched={}) is not None
    undecided = {**requests, ONE: a_waiting(a_job(prompt=SECOND, compression=perhaps))}
    assert followers.choose_leader(house, ONE, 0, undecided, context, launched={}) is None
    undecided = {**requests, TWO: a(LookingUp, evolve(leader, job=a_job(prompt=FIRST, compression=perhaps)))}
    assert followers.choose_leader(house, ONE, 0, undecided, context, launched={}) is None
    decided = {**requests, TWO: a(Prefilling, evolve(leader, job=a_job(prompt=FIRST, compression=perhaps)))}
    assert followers.choose_leader(house, ONE, 0, decided, context, launched={}) is not None
    only_long = {**requests, ONE: a_waiting(a_job(prompt=SECOND, compression=Compression("auto", threshold=12)))}
    assert followers.choose_leader(house, ONE, 0, only_long, context, launched={}) is not None


def test_waiting_has_a_price_and_so_has_computing() -> None:
    """A chunk is 8 rows. One row takes 10 ns."""
    leader = some(job=a_job(prompt=FIRST), prompt=FIRST)
    rates = Rates(prefill=(10,))
    assert follow(a(Prefilling, leader), rates=rates) == Follow(TWO, 16, waiting_ns=160, computing_ns=80 + 160)
    # The request has 12 rows and the leader none: four rows of its own are there before two chunks of the leader.
    assert follow(a(Prefilling, leader), own_rows=12, rates=rates) is None
    assert follow(a(Prefilling, leader), own_rows=12) is None, "rows stand for times where none was measured"
    assert rows_of(follow(a(Prefilling, leader), own_rows=8, rates=rates)) == 16


def test_what_is_computed_beside_decode_steps_does_not_wait_for_a_wide_prefill() -> None:
    leader = a(Prefilling, some(job=a_job(prompt=FIRST), prompt=FIRST))
    prompt_lane = evolve(ROOMY, prompt_lane_min_rows=8, chunk=16)
    assert follow(leader, prompt=SECOND[:9], settings=prompt_lane) is None
    assert rows_of(follow(leader, settings=prompt_lane)) == 16


def test_positional_state_is_followed_only_where_the_leader_can_still_keep_it() -> None:
    leader = some(job=a_job(prompt=FIRST), prompt=FIRST)
    assert rows_of(follow(a(Prefilling, leader), settings=STATEFUL)) == 16
    eight: Tokens = (*HEAD[:8], 3, 3, 3)
    assert rows_of(follow(a(Prefilling, leader), prompt=eight, settings=STATEFUL)) == 8, "its chunk has yet to begin"
    chunk = RunPrefill(SlotId(0), 0, 8)
    assert follow(a(Prefilling, leader), prompt=eight, settings=STATEFUL, launched=chunk) is None
    assert rows_of(follow(a(Prefilling, leader), settings=STATEFUL, launched=chunk)) == 16
    kept = evolve(chunk, device_checkpoint=CheckpointId(0))
    assert rows_of(follow(a(Prefilling, leader), prompt=eight, settings=STATEFUL, launched=kept)) == 8
    assert follow(a(Prefilling, leader), settings=evolve(STATEFUL, state_checkpoints=0)) is None
    restoring = a_restoring(leader, load_start=0, stop=12)
    assert isinstance(restoring, Restoring)
    assert rows_of(follow(restoring, settings=STATEFUL)) == 16
    assert follow(evolve(restoring, stop=16), settings=STATEFUL) is None


def test_a_launch_of_several_chunks_ends_before_rows_that_the_device_does_not_have_yet() -> None:
    """Two chunks of 4 rows may be launched behind those that were reported."""
    leader = some(job=a_job(prompt=FIRST), prompt=FIRST)
    chunks = RunPrefill(SlotId(0), 0, 20)
    eight: Tokens = (*HEAD[:8], 3, 3, 3)
    assert rows_of(follow(a(Prefilling, leader), settings=SPANNING, launched=chunks)) == 16
    assert follow(a(Prefilling, leader), prompt=eight, settings=SPANNING, launched=chunks) is None
    reported = some(job=a_job(prompt=FIRST), prompt=FIRST, valid=8)
    assert follow(a(Prefilling, reported), settings=SPANNING, launched=chunks) is None
    unstoppable = evolve(SPANNING, mixed_launches=False)
    assert follow(a(Prefilling, leader), settings=unstoppable, launched=chunks) is None
    beside_steps = evolve(chunks, forward_rows=8)
    assert follow(a(Prefilling, leader), settings=SPANNING, launched=beside_steps) is None


# --- in the world ---


def after(settings: Settings, *events: tuple[RequestId, Event]) -> tuple[World, tuple[Output, ...]]:
    """The world after these events, and what the last one put out."""
    world, outs = make_world(settings), tuple[Output, ...]()
    for request, event in events:
        world, outs = advance(world, ForRequest(request, event))
        check_world(world)
    return world, outs


def submitted(request: RequestId, prompt: Tokens) -> tuple[RequestId, Event]:
    return request, Submitted(a_job(prompt=prompt))


def effects_of(outs: tuple[Output, ...], kind: type[Effect]) -> list[tuple[RequestId, Effect]]:
    """The effects of one type, launched or not, with their requests."""
    found = list[EffectRequest]()
    for out in outs:
        found += [out] if isinstance(out, EffectRequest) else out.effect_requests
    return [(one.request, one.effect) for one in found if isinstance(one.effect, kind)]


START = (submitted(ONE, FIRST), submitted(TWO, SECOND), submitted(THREE, SECOND))


def test_the_head_is_computed_once() -> None:
    world, _ = after(ROOMY, *START)
    assert isinstance(world.requests[TWO], Waiting)
    assert {one: (each.leader, each.awaited_rows) for one, each in world.slots.follows.items()} == {
        TWO: (ONE, 16),
        THREE: (ONE, 16),
    }
    world, outs = after(ROOMY, *START, (ONE, PrefillAdvanced(8)))
    assert effects_of(outs, OpenSlot) == []
    world, outs = after(ROOMY, *START, (ONE, PrefillAdvanced(8)), (ONE, PrefillAdvanced(16)))
    (request, opening), *others = effects_of(outs, OpenSlot)
    assert isinstance(opening, OpenSlot)
    assert (request, opening.source, opening.keep) == (TWO, SlotId(0), 16)
    state = world.requests[TWO]
    assert isinstance(state, Prefilling)
    assert (state.slot_lease.valid_rows, state.prompt.followed) == (16, Followed(16))
    assert others == [], "request 3 has more in common with request 2, which is computing it now"
    assert world.slots.follows[THREE].leader == TWO


@pytest.mark.parametrize("slots", [4, 10])
def test_ten_that_begin_together_compute_their_head_once(slots: int) -> None:
    """A request that finds no slot waits for one, and then finds the head there as well."""
    ids = [RequestId(number) for number in range(1, 11)]
    events = [submitted(request, (*HEAD, *[50 + request] * 5)) for request in ids]
    world, _ = after(evolve(ROOMY, slots=slots), *events)
    leaders = {follow.leader for follow in world.slots.follows.values()}
    assert (leaders, len(world.slots.follows)) == ({ONE}, slots - 1)
    world, outs = after(evolve(ROOMY, slots=slots), *events, (ONE, PrefillAdvanced(8)), (ONE, PrefillAdvanced(16)))
    opened = [(request, effect.keep) for request, effect in effects_of(outs, OpenSlot) if isinstance(effect, OpenSlot)]
    assert opened == [(request, 16) for request in ids[1:slots]]
    world, outs = advance(world, ForRequest(TWO, GONE))
    check_world(world)
    opened = [(request, effect.keep) for request, effect in effects_of(outs, OpenSlot) if isinstance(effect, OpenSlot)]
    assert opened == ([(ids[slots], 16)] if slots < 10 else [])


@pytest.mark.parametrize("rates", [Rates(), Rates(prefill=(10,))], ids=["unknown", "measured"])
def test_a_report_says_what_was_waited_for_and_at_what_price(rates: Rates) -> None:
    steps = (*START[:2], (ONE, PrefillAdvanced(8)), (ONE, PrefillAdvanced(16)), (TWO, GONE))
    _, outs = after(evolve(ROOMY, rates=rates), *steps)
    ((request, closing),) = effects_of(outs, CloseStream)
    assert isinstance(closing, CloseStream)
    report = closing.report
    assert (request, report.restored_tokens, report.followed_tokens) == (TWO, 16, 16)
    price = (160, 80 + 160) if rates.prefill else (0, 0)
    assert (report.follow_wait_ns, report.follow_compute_ns) == price


@pytest.mark.parametrize("end", [GONE, DeviceFailed("broken", "")])
def test_without_its_leader_the_first_follower_computes_and_leads_the_others(end: Event) -> None:
    events = [*START, (ONE, end)]
    world, _ = after(ROOMY, *events)
    if isinstance(world.requests[TWO], Waiting):  # a leader that drains leads no more, and its lane is free later
        world, _ = after(ROOMY, *events, (ONE, PrefillAdvanced(8)))
    assert isinstance(world.requests[TWO], Prefilling)
    assert isinstance(world.requests[THREE], Waiting)
    assert world.slots.follows[THREE].leader == TWO


def test_a_leader_that_loses_its_rows_leads_no_more() -> None:
    world, _ = after(ROOMY, *START[:2])
    world, outs = advance(world, ForEngine(SlotsLost((SlotId(0),))))
    check_world(world)
    assert [request for request, _ in effects_of(outs, OpenSlot)] == [TWO]


def test_a_prompt_of_another_salt_is_computed_at_once() -> None:
    world, _ = after(ROOMY, START[0], (TWO, Submitted(a_job(prompt=SECOND, salt="b"))))
    assert isinstance(world.requests[TWO], Prefilling)
    assert not world.slots.follows


def test_a_leader_that_is_compressed_against_expectation_leads_no_more() -> None:
    """Computing its prompt turns out to be slower than scoring it, while the store is searched for it."""
    settings = evolve(ROOMY, store=True, scorer_max_tokens=1000, rates=Rates(prefill=(10,), scoring=20))
    perhaps, never = Compression("auto", threshold=4), Compression("off")
    other = a_job(prompt=(9, *SECOND[1:]), compression=never)
    events = (
        (THREE, Submitted(other)),
        (THREE, PrefixMissed("")),
        (ONE, Submitted(a_job(prompt=FIRST, compression=perhaps))),
        (TWO, Submitted(a_job(prompt=SECOND, compression=never))),
    )
    world, _ = after(settings, *events)
    assert world.slots.follows[TWO].leader == ONE
    world, _ = after(settings, *events, (THREE, PrefillAdvanced(8, ns=8_000)), (ONE, PrefixMissed("")))
    assert isinstance(world.requests[ONE], LoadingScorer)
    assert isinstance(world.requests[TWO], LookingUp), "it goes on by itself"
    assert not world.slots.follows


def test_a_follower_that_leaves_is_forgotten() -> None:
    world, _ = after(ROOMY, *START, (TWO, GONE))
    assert list(world.slots.follows) == [THREE]


def test_a_free_slot_stays_for_a_follower_and_a_further_one_goes_to_who_is_behind() -> None:
    other = (9, *SECOND[1:])
    three_slots, two_slots = evolve(PLAIN, slots=3), PLAIN
    world, _ = after(three_slots, submitted(ONE, FIRST), submitted(TWO, SECOND), submitted(THREE, other))
    assert isinstance(world.requests[THREE], Prefilling)
    world, _ = after(two_slots, submitted(ONE, FIRST), submitted(TWO, SECOND), submitted(THREE, other))
    assert isinstance(world.requests[THREE], Waiting)
    assert world.slots.waiting == (TWO, THREE)


def test_followers_do_not_fill_the_queue_while_slots_are_free_for_them() -> None:
    house = evolve(PLAIN, slots=3, max_queue=1)
    four, five = RequestId(4), RequestId(5)
    events = (*START, submitted(four, SECOND))
    world, _ = after(house, *events)
    assert world.slots.waiting == (TWO, THREE, four)
    _, outs = after(house, *events, submitted(five, SECOND))
    assert [request for request, _ in effects_of(outs, CloseStream)] == [five]


def test_a_leader_stops_where_its_follower_needs_the_positional_state() -> None:
    long = evolve(STATEFUL, slots=4, chunk=8, store=False)
    prompt = (*PROMPT[:12], *range(900, 912))
    world, outs = after(long, submitted(ONE, PROMPT), submitted(TWO, prompt), (ONE, PrefillAdvanced(8)))
    assert [effect for _, effect in effects_of(outs, RunPrefill)] == [
        RunPrefill(SlotId(0), 8, 12, device_checkpoint=CheckpointId(0))
    ]
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(12)))
    check_world(world)
    ((request, opening),) = effects_of(outs, OpenSlot)
    assert isinstance(opening, OpenSlot)
    assert (request, opening.source, opening.keep, opening.device_checkpoint) == (TWO, SlotId(0), 12, CheckpointId(0))


def test_a_prefill_that_waits_for_its_lane_is_cut_where_a_follower_needs_the_positional_state() -> None:
    settings = evolve(STATEFUL, slots=4, chunk=16, store=False)
    other, head = (9, *FIRST[1:]), (*HEAD[:12], 7, 7, 7, 7, 7)
    four = RequestId(4)
    asked = (
        *(submitted(THREE, other), submitted(ONE, FIRST), submitted(TWO, head)),
        submitted(four, (*HEAD[:12], 8, 8, 8, 8, 8)),
    )
    world, _ = after(settings, *asked)
    assert {one: (each.leader, each.awaited_rows) for one, each in world.slots.follows.items()} == {
        TWO: (ONE, 12),
        four: (ONE, 12),
    }
    assert [one.effect for one in world.lanes[MAIN].waiting] == [RunPrefill(SlotId(1), 0, 12)]
    world, outs = after(settings, *asked, (THREE, GONE), (THREE, PrefillAdvanced(16)))
    kept = RunPrefill(SlotId(1), 0, 12, device_checkpoint=CheckpointId(0))
    assert effects_of(outs, RunPrefill) == [(ONE, kept)]
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(12)))
    check_world(world)
    opened = [(request, effect.keep) for request, effect in effects_of(outs, OpenSlot) if isinstance(effect, OpenSlot)]
    assert opened == [(TWO, 12), (four, 12)]


def test_a_head_that_ends_in_the_chunk_of_the_first_is_computed_by_the_second_and_kept_for_the_third() -> None:
    settings = evolve(STATEFUL, slots=4, chunk=16, store=False)
    head = HEAD[:8]
    asked = [submitted(request, (*head, *[request] * 7)) for request in (ONE, TWO, THREE)]
    world, _ = after(settings, *asked)
    assert isinstance(world.requests[TWO], Prefilling)
    assert {one: (each.leader, each.awaited_rows) for one, each in world.slots.follows.items()} == {THREE: (TWO, 8)}
    assert [one.effect for one in world.lanes[MAIN].waiting] == [RunPrefill(SlotId(1), 0, 8)]


def test_a_launch_of_several_chunks_is_ended_for_a_follower_once() -> None:
    prompt = tuple(range(100, 161))
    head = prompt[:24]
    asked = (
        submitted(ONE, prompt),
        (ONE, PrefillAdvanced(4)),  # the first effect is one chunk
        submitted(TWO, (*head, 7, 7, 7, 7)),
    )
    world, outs = after(SPANNING, *asked)
    assert effects_of(outs, StopLaunch) == [(ONE, StopLaunch())], "it would end at row 36"
    assert world.slots.follows[TWO].awaited_rows == 24
    world, outs = advance(world, ForRequest(THREE, Submitted(a_job(prompt=(*head, 8, 8, 8, 8)))))
    check_world(world)
    assert effects_of(outs, StopLaunch) == []
    world, _ = advance(world, ForRequest(ONE, PrefillAdvanced(8, more=True)))
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(12)))
    check_world(world)
    assert effects_of(outs, RunPrefill) == [(ONE, RunPrefill(SlotId(0), 12, 24, device_checkpoint=CheckpointId(0)))]


def test_a_prompt_with_followers_goes_before_one_that_is_shorter_than_it_but_not_than_their_head() -> None:
    long, short = tuple(range(200, 261)), tuple(range(300, 330))
    head = (*long[:16], 7, 7, 7, 7, 7)
    settings = evolve(ROOMY, max_context=128)
    asked = (submitted(ONE, long), submitted(THREE, short), submitted(TWO, head), (ONE, PrefillAdvanced(8)))
    _, outs = after(settings, *asked)
    assert [request for request, _ in effects_of(outs, RunPrefill)] == [ONE]
    _, outs = after(settings, *asked[:2], asked[3])
    assert [request for request, _ in effects_of(outs, RunPrefill)] == [THREE]
