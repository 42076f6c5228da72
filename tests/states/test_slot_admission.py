"""Admission: which slot a request gets, and which rows it can keep."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.ids import RequestId, SlotId, Tokens
from effects.job import Job
from states import policy, slot_admission, slots
from states.events import Admitted
from states.request_states import LookingUp, Prefilling, Snapshotting, Speculating, State, get_remainder
from states.settings import DecisionContext, Settings
from states.slots import Slot, Slots
from tests.states.builders import (
    ONE,
    PLAIN,
    PROMPT,
    THREE,
    TWO,
    a,
    a_house,
    a_job,
    a_waiting,
    answering,
    some,
    waiting_for,
)

OTHER: Tokens = tuple(range(500, 530))


def admitted(
    house: Slots,
    requests: dict[RequestId, State] | None = None,
    prompt: Tokens = PROMPT,
    settings: Settings = PLAIN,
    job: Job | None = None,
) -> Admitted:
    """Return how request 1 is admitted to these slots."""
    job = job or a_job(prompt=prompt)
    after, admission = slot_admission.admit_next(
        evolve(house, waiting=(ONE,)), {**(requests or {}), **waiting_for(job)}, {}, DecisionContext(settings)
    )
    assert admission is not None
    request, event = admission
    assert request == ONE
    assert after.waiting == ()
    alone = policy.decide_one_off(job).go
    brief = alone and job.max_tokens <= slot_admission.BRIEF_ANSWER
    assert after.slots[event.slot] == Slot((), ONE, house.slots[event.slot].last_release, one_off=alone, is_brief=brief)
    others = [number for number in range(len(house.slots)) if number != event.slot]
    assert [after.slots[number] for number in others] == [house.slots[number] for number in others]
    return event


def slot_lease(slot: int, source: int, keep: int) -> Admitted:
    return Admitted(SlotId(slot), SlotId(source), keep)


def test_nobody_is_admitted_without_a_free_slot_or_without_a_queue() -> None:
    busy, empty = a_house(Slot(holder=TWO), waiting=(ONE,)), a_house(Slot())
    assert slot_admission.admit_next(busy, waiting_for(a_job()), {}, DecisionContext(PLAIN)) == (busy, None)
    assert slot_admission.admit_next(empty, {}, {}, DecisionContext(PLAIN)) == (empty, None)


def test_a_spare_slot_is_for_a_request_that_would_wait_for_a_snapshot() -> None:
    """Two requests are served at once in three slots. A request that is saved is not served any more."""
    settings = evolve(PLAIN, slots=3, spare_slots=1)
    context = DecisionContext(settings)
    house = a_house(Slot(holder=TWO), Slot(holder=THREE), Slot(), waiting=(ONE,))
    state = a(Speculating, answering())
    served: dict[RequestId, State] = {TWO: state, THREE: state, **waiting_for(a_job())}
    assert slots.count_openings(house, served, settings) == 0
    assert slot_admission.admit_next(house, served, {}, context) == (house, None)
    saving: dict[RequestId, State] = {**served, TWO: Snapshotting(get_remainder(state))}
    assert slots.count_openings(house, saving, settings) == 1
    after, admission = slot_admission.admit_next(house, saving, {}, context)
    assert admission is not None
    assert after.slots[2].holder == ONE
    assert slots.count_openings(after, {**saving, ONE: state}, settings) == 0


def test_snapshots_are_hurried_before_the_last_spare_slot_is_taken() -> None:
    settings = evolve(PLAIN, slots=6, spare_slots=4)
    busy = Slot(holder=TWO)
    assert not slots.hurries_snapshots(a_house(busy, busy, busy, Slot(), Slot(), Slot()), settings)
    assert slots.hurries_snapshots(a_house(busy, busy, busy, busy, Slot(), Slot()), settings)
    assert slots.hurries_snapshots(a_house(Slot(), waiting=(ONE,)), settings)
    assert not slots.hurries_snapshots(a_house(busy, busy), evolve(settings, spare_slots=0))


def test_first_come_first_served() -> None:
    requests: dict[RequestId, State] = {TWO: a_waiting(), ONE: a_waiting()}
    context = DecisionContext(PLAIN)
    after, admission = slot_admission.admit_next(a_house(Slot(), waiting=(TWO, ONE)), requests, {}, context)
    assert admission is not None
    assert (after.waiting, admission[0]) == ((ONE,), TWO)


def test_an_empty_house_gives_its_first_slot() -> None:
    assert admitted(a_house(Slot(), Slot())) == slot_lease(0, 0, 0)


def test_nothing_shared_takes_the_slot_that_went_unused_longest() -> None:
    assert admitted(a_house(Slot(OTHER, None, 5), Slot(OTHER, None, 3), Slot(OTHER, None, 4))) == slot_lease(1, 1, 0)


def test_the_longest_prefix_is_continued_in_place() -> None:
    assert admitted(a_house(Slot(PROMPT[:8]), Slot(PROMPT[:16]), Slot(OTHER))) == slot_lease(1, 1, 16)


@pytest.mark.parametrize(("rows", "keep"), [(3, 0), (4, 4), (7, 4), (8, 8), (19, 16), (20, 20), (21, 20)])
def test_what_is_kept_is_whole_grains(rows: int, keep: int) -> None:
    assert admitted(a_house(Slot(PROMPT[:rows]))).keep == keep


@pytest.mark.parametrize(("length", "keep"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16), (21, 20)])
def test_the_last_prompt_token_is_always_computed(length: int, keep: int) -> None:
    assert admitted(a_house(Slot(PROMPT)), prompt=PROMPT[:length]).keep == keep


def test_a_tail_of_one_grain_is_overwritten_and_a_longer_one_is_copied_away_from() -> None:
    other = Slot(OTHER, None, 9)
    assert admitted(a_house(Slot((*PROMPT[:8], *OTHER[:4])), other)) == slot_lease(0, 0, 8)
    assert admitted(a_house(Slot((*PROMPT[:8], *OTHER[:7])), other)) == slot_lease(0, 0, 8)
    assert admitted(a_house(Slot((*PROMPT[:8], *OTHER[:8])), other)) == slot_lease(1, 0, 8)


def test_a_long_tail_is_overwritten_when_no_other_slot_is_free() -> None:
    house = a_house(Slot((*PROMPT[:8], *OTHER)), Slot(holder=TWO))
    other = some(slot=SlotId(1), job=a_job(salt="another"))
    assert admitted(house, {TWO: a(LookingUp, other)}) == slot_lease(0, 0, 8)


def test_of_equal_prefixes_one_that_loses_nothing_is_continued() -> None:
    assert admitted(a_house(Slot((*PROMPT[:8], *OTHER)), Slot(PROMPT[:8], None, 9))) == slot_lease(1, 1, 8)


def test_of_equal_prefixes_a_free_slot_comes_before_a_busy_one() -> None:
    busy = answering(slot=SlotId(0), prompt=PROMPT[:9], valid=8, answer=())
    house = a_house(Slot(holder=TWO), Slot(PROMPT[:8]))
    assert admitted(house, {TWO: a(Prefilling, busy)}) == slot_lease(1, 1, 8)


def test_a_busy_slot_is_copied_as_far_as_its_rows_are_acknowledged() -> None:
    house = a_house(Slot(holder=TWO), Slot(OTHER, None, 2), Slot(OTHER, None, 1))
    running = some(valid=8)
    assert admitted(house, {TWO: a(Prefilling, running)}, (*PROMPT[:8], *OTHER)) == slot_lease(2, 0, 8)
    assert admitted(house, {TWO: a(Speculating, answering())}) == slot_lease(2, 0, 20)


def test_a_decoded_answer_is_part_of_what_can_be_continued() -> None:
    turn = (*PROMPT, 7, 8, 9, 10)
    hold = answering(answer=(7, 8, 9, 10), valid=24)
    house = a_house(Slot(holder=TWO), Slot())
    assert admitted(house, {TWO: a(Speculating, hold)}, prompt=turn) == slot_lease(1, 0, 24)
    only_prompts = evolve(PLAIN, keep_decoded=False)
    assert admitted(house, {TWO: a(Speculating, hold)}, turn, only_prompts) == slot_lease(1, 0, 20)


def test_a_released_slot_keeps_its_sequence_and_its_turn() -> None:
    house = a_house(Slot(), Slot((), ONE, 3), waiting=(THREE,), release_count=9)
    hold = answering(slot=SlotId(1))
    after = slots.release_slot(house, ONE, hold.remainder, PLAIN)
    assert after == Slots((Slot(), Slot((*PROMPT, 7), None, 10)), (THREE,), 10)


def test_where_decoding_differs_from_prefill_a_slot_keeps_the_prompt_only() -> None:
    only_prompts = evolve(PLAIN, keep_decoded=False)
    assert (
        slots.release_slot(a_house(Slot((), ONE)), ONE, answering().remainder, only_prompts).slots[0].tokens
        == PROMPT[:20]
    )


def test_rows_are_shared_with_jobs_of_the_same_salt_only() -> None:
    plain, salted = Slot(PROMPT), Slot(PROMPT, salt="a")
    assert admitted(a_house(plain), job=a_job(salt="a")).keep == 0
    assert admitted(a_house(salted)).keep == 0
    assert admitted(a_house(salted), job=a_job(salt="b")).keep == 0
    assert admitted(a_house(plain, salted), job=a_job(salt="a")) == slot_lease(1, 1, 20)
    busy = {TWO: a(Speculating, answering(job=a_job(salt="a")))}
    assert admitted(a_house(Slot(), Slot(holder=TWO)), busy).keep == 0
    assert admitted(a_house(Slot(), Slot(holder=TWO)), busy, job=a_job(salt="a")).keep > 0
    released = slots.release_slot(a_house(Slot((), ONE)), ONE, answering(job=a_job(salt="a")).remainder, PLAIN)
    assert released.slots[0] == Slot((*PROMPT, 7), None, 10, "a")


def test_where_a_prompts_logprobs_are_asked_for_nothing_is_shared() -> None:
    job = a_job(prompt_logprobs=0)
    assert admitted(a_house(Slot(PROMPT)), job=job).keep == 0
    busy = {TWO: a(Speculating, answering(job=job))}
    assert admitted(a_house(Slot(), Slot(holder=TWO)), busy).keep == 0
    assert slots.release_slot(a_house(Slot((), ONE)), ONE, answering(job=job).remainder, PLAIN).slots[0].tokens == ()


def test_a_slot_is_released_by_its_holder_only() -> None:
    with pytest.raises(AssertionError):
        slots.release_slot(a_house(Slot((), TWO)), ONE, some().remainder, PLAIN)


def test_leaving_the_queue_keeps_the_others_in_order() -> None:
    house = a_house(Slot(holder=RequestId(9)), waiting=(ONE, TWO, THREE))
    assert slots.leave_queue(house, TWO).waiting == (ONE, THREE)
    assert slots.leave_queue(house, RequestId(9)) == house
    assert slots.enqueue(house, RequestId(4)).waiting == (ONE, TWO, THREE, RequestId(4))


TITLE = a_job(prompt=OTHER[:6], opens=True)
LEFT = OTHER[6:14]  # by an earlier one
TURN = Slot(PROMPT, None, 1)  # of a conversation


@pytest.mark.parametrize(
    ("house", "seated"),
    [
        ((TURN, Slot(LEFT, None, 9, one_off=True)), slot_lease(1, 1, 0)),
        ((Slot(LEFT, None, 9, one_off=True), TURN), slot_lease(0, 0, 0)),
        ((TURN, Slot((), None, 9)), slot_lease(1, 1, 0)),
        # It overwrites a tail that no request will come back to.
        ((TURN, Slot(OTHER, None, 9, one_off=True)), slot_lease(1, 1, 4)),
        ((TURN, Slot(LEFT, None, 9)), slot_lease(0, 0, 0)),  # two conversations: the older one
        ((TURN,), slot_lease(0, 0, 0)),
        # The other slot keeps what the prompt begins with.
        ((Slot(OTHER[:8], None, 9), Slot(LEFT, None, 1, one_off=True)), slot_lease(1, 0, 4)),
    ],
)
def test_a_one_off_takes_what_keeps_no_conversation(house: tuple[Slot, ...], seated: Admitted) -> None:
    assert admitted(a_house(*house), job=TITLE) == seated


def test_a_conversation_too_takes_first_what_one_offs_have_left() -> None:
    house = a_house(TURN, Slot(LEFT, None, 9, one_off=True), Slot(OTHER[14:], None, 2))
    assert admitted(house, prompt=LEFT[::-1]) == slot_lease(1, 1, 0)


def test_a_conversation_that_nobody_came_back_to_is_spared_no_longer() -> None:
    left = Slot(LEFT, None, 9, one_off=True)
    assert admitted(evolve(a_house(TURN, left), release_count=slots.CONVERSATION_PATIENCE), job=TITLE).slot == 1
    assert admitted(evolve(a_house(TURN, left), release_count=slots.CONVERSATION_PATIENCE + 1), job=TITLE).slot == 0


def test_a_slot_knows_who_left_it() -> None:
    house = a_house(Slot((), ONE, one_off=True))
    assert slots.release_slot(house, ONE, some(prompt=PROMPT, valid=20).remainder, PLAIN).slots[0].one_off
    assert not slots.release_slot(a_house(Slot((), ONE)), ONE, some().remainder, PLAIN).slots[0].one_off


def waiting_in(house: Slots, requests: dict[RequestId, State], settings: Settings = PLAIN) -> RequestId | None:
    """Return the request that is admitted next. ONE is a one-off, TWO a turn of a conversation, THREE is being answered
    in slot 1.
    """
    answered: dict[RequestId, State] = {THREE: a(Speculating, answering(slot=SlotId(1)))}
    _, admission = slot_admission.admit_next(house, {**answered, **requests}, {}, DecisionContext(settings))
    return None if admission is None else admission[0]


def test_a_one_off_waits_for_another_rather_than_push_a_conversation_off_and_lets_others_pass() -> None:
    waits = waiting_for(TITLE)
    both = {**waits, TWO: a_waiting()}
    other = Slot(holder=THREE, one_off=True, is_brief=True)
    assert waiting_in(a_house(TURN, other, waiting=(ONE,)), waits) is None
    assert waiting_in(a_house(TURN, other, waiting=(ONE, TWO)), both) == TWO
    assert waiting_in(a_house(TURN, Slot(holder=THREE), waiting=(ONE,)), waits) == ONE  # nothing to wait for
    long = Slot(holder=THREE, one_off=True)
    assert waiting_in(a_house(TURN, long, waiting=(ONE,)), waits) == ONE  # its end cannot be foreseen
    assert waiting_in(a_house(Slot(), other, waiting=(ONE,)), waits) == ONE
    assert waiting_in(a_house(Slot(LEFT, one_off=True), other, waiting=(ONE,)), waits) == ONE
    full = evolve(PLAIN, max_queue=1)
    assert waiting_in(a_house(TURN, other, waiting=(ONE,)), waits, full) == ONE, "else the queue would refuse another"


def test_those_who_pass_keep_the_order_of_the_queue() -> None:
    requests: dict[RequestId, State] = {
        **waiting_for(TITLE),
        TWO: a_waiting(),
        THREE: a(Speculating, answering(slot=SlotId(1))),
    }
    house = a_house(TURN, Slot(holder=THREE, one_off=True, is_brief=True), waiting=(ONE, TWO))
    after, admission = slot_admission.admit_next(house, requests, {}, DecisionContext(PLAIN))
    assert admission is not None
    assert after.waiting == (ONE,)
