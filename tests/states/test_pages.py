"""Tests of rows in pages that slots share: which request gets which pages, which one waits, and that none waits for
ever.
"""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.all import EffectRequest
from effects.compression import Compression
from effects.decode import RunDecode
from effects.ids import PageId, RequestId
from effects.job import Job
from effects.prefill import OpenSlot
from states import page_growth, pages, slot_admission, slots
from states.events import ForRequest, Submitted
from states.pages import Pages
from states.request_states import Generated, Prompt, ProposesNothing, SlotLease, Speculating, State, Waiting
from states.settings import DecisionContext, Settings
from states.slots import Slot, Slots
from states.world import make_world
from tests.states.builders import ONE, THREE, TWO, advance

PAGE = 8
POOL = Settings(slots=4, max_context=64, chunk=8, block_size=4, batch_rows=8, pages=8, page=PAGE, shares_pages=True)
PROMPT = tuple(range(100, 121))  # 21 rows: two pages and a part of one


def ids(*numbers: int) -> Pages:
    return tuple(map(PageId, numbers))


def job(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 3, **more: object) -> Job:
    return evolve(Job(prompt, max_tokens), **more)


def decoding(one: Job, slot: int, said: int = 0) -> State:
    slot_lease = SlotLease(slots.SlotId(slot), len(one.prompt) - 1 + said)
    return Speculating(slot_lease, Prompt(one, one.prompt), ProposesNothing("declined"), Generated((1,) * said))


def house(*slots_: Slot, waiting: tuple[RequestId, ...] = ()) -> Slots:
    return Slots((*slots_, *(Slot(),) * (POOL.slots - len(slots_))), waiting)


@pytest.mark.parametrize(
    ("running", "total", "safe"),
    [
        ([], 0, True),
        ([(ids(0, 1), 2)], 2, True),
        ([(ids(0, 1), 3)], 2, False),
        ([(ids(0, 1), 4), (ids(2, 3), 4)], 6, True),  # one after the other
        ([(ids(0, 1), 4), (ids(2, 3), 4)], 5, False),  # each waits for what the other has
        ([(ids(0), 4), (ids(1, 2, 3), 4)], 5, True),  # the second ends first, and leaves enough
        ([(ids(0, 1, 2), 4), (ids(0, 1, 3), 4)], 5, True),
        ([(ids(0, 1), 3), (ids(0, 1), 3), (ids(2), 5)], 5, True),  # what two have comes free with the second
        ([(ids(0, 1), 3), (ids(0, 1), 4), (ids(2), 5)], 4, False),
    ],
)
def test_all_that_run_come_to_their_ends_one_after_the_other(
    running: list[tuple[Pages, int]], total: int, safe: bool
) -> None:
    assert pages.can_all_finish(running, total) is safe


@pytest.mark.parametrize(
    ("count", "claim", "total", "fits"),
    [
        (16, 100, 16, True),  # so few run whatever they claim
        (17, 2, 34, True),
        (17, 2, 33, False),
        (17, 100, 17 * 4, True),  # enough for short sequences, though not for all that is claimed
        (17, 100, 17 * 4 - 1, False),
    ],
)
def test_many_requests_run_only_if_the_pool_has_room_for_what_they_claim(
    count: int, claim: int, total: int, *, fits: bool
) -> None:
    settings = Settings(pages=total, page=1024, max_context=1024)
    running = [(ids(number), claim) for number in range(count)]
    assert pages.have_room(running, settings) is fits


def test_what_many_requests_hold_together_is_counted_once() -> None:
    running = [(ids(0, 1, 2 + number), 4) for number in range(17)]
    assert pages.have_room(running, Settings(pages=36, page=1024, max_context=1024))
    assert not pages.have_room(running, Settings(pages=35, page=1024, max_context=1024))


def test_a_claim_is_the_prompt_and_the_answer_within_the_context() -> None:
    assert [pages.compute_claim(POOL, job(PROMPT, count)) for count in (3, 4, 11, 12)] == [3, 4, 4, 5]
    assert pages.compute_claim(POOL, job(tuple(range(500)), 3)) == 8


def test_whole_pages_are_shared_and_the_rest_is_copied() -> None:
    source = ids(5, 6, 7)
    assert pages.select_reusable_pages(source, 21, PAGE, {5, 6, 7}, shared=True) == [5, 6, None]
    assert pages.select_reusable_pages(source, 16, PAGE, {5, 6, 7}, shared=True) == [5, 6]
    assert pages.select_reusable_pages(source, 21, PAGE, {5, 6, 7}, shared=False) == [None, None, None]
    assert pages.select_reusable_pages(source, 21, PAGE, set(), shared=False) == [5, 6, 7]
    assert pages.select_reusable_pages(source, 21, PAGE, {6}, shared=False) == [5, None, 7]


def admitted(before: Slots, prompt: Job, requests: dict[RequestId, State] | None = None, **more: int) -> Slots | None:
    everybody = {**(requests or {}), ONE: Waiting(Prompt(prompt, prompt.prompt))}
    context = DecisionContext(evolve(POOL, **more))
    after, admission = slot_admission.admit_next(evolve(before, waiting=(ONE,)), everybody, {}, context)
    return None if admission is None else after


def test_a_prompt_takes_its_pages_and_shares_those_of_a_head_in_common() -> None:
    after = admitted(house(), job())
    assert after is not None
    assert after.slots[0].pages == ids(0, 1, 2)
    busy = house(Slot(holder=TWO, pages=ids(0, 1, 2)))
    after = admitted(busy, job((*PROMPT[:18], 7, 7, 7)), {TWO: decoding(job(), 0)})
    assert after is not None
    assert after.slots[1].pages == ids(0, 1, 3)
    apart = admitted(busy, job((*PROMPT[:18], 7, 7, 7)), {TWO: decoding(job(), 0)}, shares_pages=False)
    assert apart is not None
    assert apart.slots[1].pages == ids(3, 4, 5)


def test_what_may_yet_be_compressed_shares_nothing_with_anybody() -> None:
    asked = Compression("auto", threshold=500)
    busy = house(Slot(holder=TWO, pages=ids(0, 1, 2)))
    for first, second in ((asked, Compression()), (Compression(), asked)):
        requests = {TWO: decoding(job(compression=first), 0)}
        after = admitted(busy, job((*PROMPT[:18], 7, 7, 7), compression=second), requests, scorer_max_tokens=1000)
        assert after is not None
        assert after.slots[1].pages == ids(3, 4, 5)


def test_idle_sequences_make_room_those_first_that_nobody_came_back_to() -> None:
    idle = house(
        Slot(tuple(range(8)), None, 5, pages=ids(0)),
        Slot(tuple(range(8, 24)), None, 3, pages=ids(1, 2)),
        Slot(tuple(range(30, 54)), None, 4, pages=ids(3, 4, 5)),
    )
    after = admitted(idle, job())
    assert after is not None
    assert after.slots[3].pages == ids(1, 2, 6)
    assert [len(slot.tokens) for slot in after.slots] == [8, 0, 24, 0]
    assert after.slots[1].pages == ()


def test_where_a_copy_has_no_room_the_sequence_itself_is_gone_on_with() -> None:
    kept = Slot((*PROMPT, *range(40)), None, 1, pages=ids(0, 1, 2, 3, 4, 5, 6, 7))
    after = admitted(house(kept), job((*PROMPT[:18], 7, 7, 7)), shares_pages=False)
    assert after is not None
    assert (after.slots[0].holder, after.slots[0].pages) == (ONE, ids(0, 1, 2))


def test_who_finds_too_few_pages_waits_until_some_come_free_and_nobody_passes() -> None:
    world = make_world(POOL)
    for number, one in enumerate((job(max_tokens=40), job(PROMPT[::-1], 8), job((1, 2), 60), job((3,), 1))):
        world, _ = advance(world, ForRequest(RequestId(number), Submitted(one)))
    assert [slot.holder for slot in world.slots.slots] == [0, 1, None, None]
    assert world.slots.waiting == (2, 3)
    assert world.slots.short_of_pages == {2}


@pytest.mark.parametrize(("max_tokens", "admitted"), [(3, 24), (30, 16)])
def test_more_than_sixteen_requests_run_if_all_have_room_to_the_end(max_tokens: int, admitted: int) -> None:
    settings = evolve(POOL, slots=24, pages=24 * 3)
    world = make_world(settings)
    for number in range(24):
        prompt = tuple(range(1000 * number, 1000 * number + 21))
        world, _ = advance(world, ForRequest(RequestId(number + 1), Submitted(job(prompt, max_tokens))))
    assert sum(slot.holder is not None for slot in world.slots.slots) == admitted
    assert len(world.slots.waiting) == 24 - admitted


def test_an_answer_takes_pages_as_it_grows_and_waits_where_there_are_none() -> None:
    requests = {TWO: decoding(job(max_tokens=40), 0, said=4), THREE: decoding(job(PROMPT[::-1], 10), 1)}
    before = house(Slot(holder=TWO, pages=ids(0, 1, 2)), Slot(holder=THREE, pages=ids(3, 4, 5)))
    first = EffectRequest(TWO, RunDecode(slots.SlotId(0), 24, 1))
    after, effect_request = page_growth.grow_for_decode_step(before, first, requests, POOL)
    assert effect_request is not None
    assert isinstance(effect_request.effect, RunDecode)
    assert (effect_request.effect.pages, after.slots[0].pages) == (ids(6), ids(0, 1, 2, 6))
    stuck, none = page_growth.grow_for_decode_step(
        after, EffectRequest(TWO, RunDecode(slots.SlotId(0), 32, 1)), requests, POOL
    )
    assert none is None  # the last page is for the other, who can end with it
    assert stuck.short_of_pages == {TWO}
    assert (
        page_growth.grow_for_decode_step(
            stuck, EffectRequest(THREE, RunDecode(slots.SlotId(1), 24, 1)), requests, POOL
        )[1]
        is not None
    )
    within = EffectRequest(TWO, RunDecode(slots.SlotId(0), 28, 1, propose=7))
    _, less = page_growth.grow_for_decode_step(after, within, requests, POOL)
    assert less is not None
    assert isinstance(less.effect, RunDecode)
    assert less.effect.propose == 3  # as much as its last page has room for


def test_an_idle_sequence_gives_its_pages_to_an_answer_that_grows() -> None:
    requests = {TWO: decoding(job(max_tokens=40), 0, said=4)}
    before = house(Slot(holder=TWO, pages=ids(0, 1, 2)), Slot(tuple(range(40)), None, 1, pages=ids(3, 4, 5, 6, 7)))
    after, effect_request = page_growth.grow_for_decode_step(
        before, EffectRequest(TWO, RunDecode(slots.SlotId(0), 24, 1)), requests, POOL
    )
    assert effect_request is not None
    assert [slot.pages for slot in after.slots[:2]] == [ids(0, 1, 2, 3), ()]
    assert after.slots[1].tokens == ()


WIDE = evolve(POOL, slots=2, max_context=400, pages=100)  # three pages ahead


def grown(before: Slots, effect: RunDecode, one: Job, settings: Settings = WIDE) -> tuple[Slots, RunDecode]:
    after, effect_request = page_growth.grow_for_decode_step(
        before, EffectRequest(TWO, effect), {TWO: decoding(one, 0, said=effect.position - 20)}, settings
    )
    assert effect_request is not None
    assert isinstance(effect_request.effect, RunDecode)
    return after, effect_request.effect


@pytest.mark.parametrize(
    ("position", "steps", "held", "new", "allowed"),
    [
        (23, 60, 3, (3, 4, 5), 25),  # its row has a page, and the answer goes on behind that
        (24, 60, 3, (3, 4, 5, 6), 32),
        (24, 9, 3, (3, 4), 9),  # as far as the answer may go
        (24, 60, 7, (), 32),  # it has them already
        (33, 60, 7, (7,), 31),
    ],
)
def test_an_answer_has_pages_ahead_so_that_its_launch_goes_on(
    position: int, steps: int, held: int, new: tuple[int, ...], allowed: int
) -> None:
    one = job(max_tokens=200)
    before = Slots((Slot(holder=TWO, pages=ids(*range(held))), Slot()))
    after, effect = grown(before, RunDecode(slots.SlotId(0), position, 1, steps=steps), one)
    assert effect.pages == ids(*new)
    assert after.slots[0].pages == ids(*range(held), *new)
    assert effect.steps == allowed


def test_nobody_loses_pages_for_those_that_an_answer_has_ahead() -> None:
    one = job(max_tokens=200)
    asked = RunDecode(slots.SlotId(0), 24, 1, steps=60)
    idle = Slot(tuple(range(760)), None, 1, pages=ids(*range(5, 100)))
    after, effect = grown(Slots((Slot(holder=TWO, pages=ids(0, 1, 2)), idle)), asked, one)
    assert (effect.pages, effect.steps, after.slots[1]) == (ids(3), 8, idle)
    after, effect = grown(Slots((Slot(holder=TWO, pages=ids(0, 1, 2, 3, 4)), idle)), asked, one)
    assert (effect.pages, effect.steps, after.slots[1]) == ((), 16, idle)
    assert not after.short_of_pages


@pytest.mark.parametrize(
    ("position", "steps", "new"),
    [
        (63, 60, (2,)),  # its slot has one row left, and an idle slot loses a page for the next ones
        (56, 60, (2,)),
        (55, 60, ()),  # it asks again before they are needed
        (63, 1, ()),  # it needs no more
    ],
)
def test_a_slot_with_few_rows_left_gets_the_next_page(position: int, steps: int, new: tuple[int, ...]) -> None:
    full = evolve(POOL, slots=2, max_context=256, pages=8, page=32)
    idle = Slot(tuple(range(192)), None, 1, pages=ids(*range(3, 8)))
    before = Slots((Slot(holder=TWO, pages=ids(0, 1)), idle))
    after, effect = grown(before, RunDecode(slots.SlotId(0), position, 1, steps=steps), job(max_tokens=200), full)
    assert effect.pages == ids(*new)
    assert effect.steps == min(steps, 64 + 32 * len(new) - position)
    assert after.slots[1] == idle


def test_pages_ahead_are_not_given_where_others_might_then_never_end() -> None:
    small = evolve(POOL, slots=2, max_context=256, pages=33)
    one = job(max_tokens=200)
    requests = {TWO: decoding(one, 0, said=4), THREE: decoding(job(PROMPT[::-1], 240), 1)}
    pair = Slots((Slot(holder=TWO, pages=ids(0, 1, 2)), Slot(holder=THREE, pages=ids(*range(3, 32)))))
    after, effect_request = page_growth.grow_for_decode_step(
        pair, EffectRequest(TWO, RunDecode(slots.SlotId(0), 23, 1, steps=60)), requests, small
    )
    assert after is pair
    assert effect_request is not None
    assert isinstance(effect_request.effect, RunDecode)
    assert (effect_request.effect.pages, effect_request.effect.steps) == ((), 1)


def test_a_slot_is_opened_with_its_pages() -> None:
    world, out = advance(make_world(POOL), ForRequest(ONE, Submitted(job())))
    opened = [
        effect_request.effect
        for effect_request in out
        if isinstance(effect_request, EffectRequest) and isinstance(effect_request.effect, OpenSlot)
    ]
    assert [one.pages for one in opened] == [ids(0, 1, 2)]
    assert world.slots.slots[0].pages == ids(0, 1, 2)


def test_settings_that_could_not_hold_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="7 pages do not hold the longest sequence, 64 rows"):
        evolve(POOL, pages=7)
    with pytest.raises(ValueError, match="no two slots may share them"):
        evolve(POOL, stateful=True)
