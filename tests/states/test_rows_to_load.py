"""Tests of which rows of a found prefix are loaded and which are computed (`choose_rows_to_load`), and of the times
behind it.
"""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from effects.ids import LeaseId, RequestId
from effects.lookup import PrefixFound
from effects.prefill import PrefillAdvanced
from effects.restore import BlocksRestored
from states import policy, rates
from states.events import ForRequest, Submitted
from states.rates import ClassGains, Rates, estimate_prefill_time, fill_gaps, find_span, get_load_time
from states.request_states import Prefilling, Prompt, Restoring, SlotLease
from states.settings import DecisionContext
from states.world import make_world
from tests.states.builders import (
    HERE,
    ONE,
    STATEFUL,
    STORE,
    a_job,
    advance,
)


def disk(load_ns: int, *prefill: int, **more: int) -> Rates:
    return Rates(prefill=prefill, loads={"disk": load_ns}, **more)


@pytest.mark.parametrize(
    ("known", "start", "load_start", "stop"),
    [
        (Rates(), 8, 8, 40),  # nothing measured: restoring is trusted
        (disk(0, 10), 8, 8, 40),
        (disk(10), 8, 8, 40),
        (disk(10, 0, 0), 8, 8, 40),
        (Rates(prefill=(10,), loads={"host": 10}), 8, 8, 40),  # of another tier
        (disk(10, 10), 8, 24, 40),  # as fast as each other: half each
        (disk(1, 1000), 8, 8, 40),  # pure restore
        (disk(1000, 1), 8, 40, 40),  # pure recompute
        (disk(30, 10), 0, 32, 40),  # 32 computed in 320 while 8 load in 240, not 28 in 280 while 12 load in 360
        (disk(10, 30), 0, 8, 40),  # 8 computed in 240 while 32 load in 320, not 12 in 360 while 28 load in 280
        (disk(10, 10), 8, 8, 12),  # one block, a tie: load it
        (disk(11, 10), 8, 12, 12),  # one block: compute it
        (disk(10, 10), 8, 8, 8),
        (disk(10, 10, prefill_slowdown=2000, load_slowdown=2000), 8, 8, 40),  # side by side is no gain: a tie, load it
        (disk(11, 10, prefill_slowdown=2000, load_slowdown=2000), 8, 40, 40),
        (disk(10, 10, prefill_slowdown=1000, load_slowdown=3000), 0, 32, 40),  # 32 computed in 320 while 8 load in 240
        (disk(10, 10, 30), 0, 1024, 2048),  # further on it would be three times slower
    ],
)
def test_front(known: Rates, start: int, load_start: int, stop: int) -> None:
    assert policy.choose_load_start(STORE, known, start, stop, "disk") == load_start


times = st.integers(0, 300)
factors = st.sampled_from((0, 1000, 1300, 2000, 9000))


@given(
    st.builds(
        Rates,
        prefill=st.lists(times, max_size=4).map(tuple),
        loads=times.map(lambda time: {"host": time}),
        prefill_slowdown=factors,
        load_slowdown=factors,
    ),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_no_choice_is_better_and_neither_is_one_side_alone(known: Rates, start: int, length: int) -> None:
    first, last = 16 * start, 16 * (start + length)
    chosen = policy.choose_load_start(evolve(STORE, chunk=16, block_size=16), known, first, last, "host")
    assert type(chosen) is int
    if not known.loads.get("host", 0) or not any(known.prefill):
        assert chosen == first
        return
    choices = range(first, last + 1, 16)
    ready = [policy.estimate_ready_time(known, first, m, last, "host") for m in choices]
    assert chosen in choices
    best, pure, got = (
        min(ready),
        min(ready[0], ready[-1]),
        policy.estimate_ready_time(known, first, chosen, last, "host"),
    )
    assert got == (best if 10 * best <= 9 * pure else pure), "both at once only where a tenth is gained"


LONG = Prompt(a_job(prompt=tuple(range(1000))), tuple(range(1000)))  # 999 rows


@pytest.mark.parametrize(
    ("valid", "ahead", "there", "load_time", "expected"),
    [
        (0, 0, (), 10, None),
        (0, 0, (800,), 0, (0, 800)),  # never measured: restoring is trusted
        (0, 0, (800,), 10, (0, 800)),
        (0, 0, (400, 800), 10, (0, 800)),  # the later one, as long as rows load quicker than they are computed
        (0, 0, (400, 800), 120, None),
        (0, 800, (400, 800), 120, (800, 800)),  # rows are there: 200 tokens' worth of state alone, at 120, beats 800
        (0, 400, (400, 800), 120, (400, 400)),  # rows behind 400 would take longer than computing them
        (0, 400, (400, 800), 90, (400, 800)),
        (700, 100, (800,), 40, (800, 800)),
        (700, 100, (800,), 60, None),  # nothing is gained by a state that is only 100 rows away
        (700, 0, (800,), 40, None),  # nor by as many rows together with it
        (700, 200, (800, 900), 60, (900, 900)),
    ],
)
def test_which_checkpoint_is_gone_on_from(
    valid: int, ahead: int, there: tuple[int, ...], load_time: int, expected: tuple[int, int] | None
) -> None:
    """Computing takes 100 a token; a checkpoint weighs as much as 200 rows."""
    known = DecisionContext(evolve(STATEFUL, state_tokens=200), Rates(prefill=(100,), loads={"disk": load_time}))
    assert policy.choose_rows_to_load(known, SlotLease(HERE, valid, rows_ahead=ahead), LONG, there, "disk") == expected


@given(
    st.builds(
        Rates, prefill=st.integers(1, 300).map(lambda time: (time,)), loads=times.map(lambda time: {"disk": time})
    ),
    st.integers(0, 400),
    st.tuples(st.integers(0, 60), st.integers(0, 90)),
    st.lists(st.integers(1, 60), max_size=4, unique=True).map(sorted),
)
def test_no_other_checkpoint_would_be_better(rates: Rates, state: int, held: tuple[int, int], there: list[int]) -> None:
    known = DecisionContext(evolve(STATEFUL, state_tokens=state), rates)
    slot_lease = SlotLease(HERE, 4 * held[0], rows_ahead=4 * held[1])
    beyond = [16 * at for at in there if 16 * at > slot_lease.valid_rows]
    chosen = policy.choose_rows_to_load(known, slot_lease, LONG, beyond, "disk")
    took = {
        at: policy.estimate_resume_time(known, slot_lease, LONG, at, "disk") for at in (slot_lease.valid_rows, *beyond)
    }
    at = slot_lease.valid_rows if chosen is None else chosen[1]
    assert at in took
    assert took[at] == min(took.values()) or not rates.loads["disk"]
    assert chosen is None or chosen[0] == min(at, slot_lease.rows), "rows that the slot has are not loaded"


@pytest.mark.parametrize(
    ("position", "span"), [(0, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2), (4095, 2), (4096, 3), (1 << 20, 11)]
)
def test_positions_belong_to_spans_that_double(position: int, span: int) -> None:
    assert find_span(position) == span


@pytest.mark.parametrize(
    ("measured", "whole"),
    [
        ((), ()),
        ((0, 0), (0, 0)),
        ((10, 0, 30), (10, 10, 30)),
        ((0, 20, 0), (20, 20, 20)),
        ((40, 30, 0), (40, 30, 40)),  # what was measured counts; what was not is no faster than anything before it
    ],
)
def test_what_was_never_measured_takes_its_neighbours_time(measured: tuple[int, ...], whole: tuple[int, ...]) -> None:
    assert fill_gaps(measured) == whole


@given(st.lists(times, max_size=4).map(tuple), st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 9000))
def test_the_time_of_a_prefill_is_that_of_its_parts(measured: tuple[int, ...], one: int, two: int, three: int) -> None:
    known, (start, middle, stop) = Rates(measured), sorted((one, two, three))
    parts = estimate_prefill_time(known, start, middle) + estimate_prefill_time(known, middle, stop)
    assert estimate_prefill_time(known, start, stop) == parts
    if any(measured):
        slowest = max(measured)
        assert parts == sum(
            (fill_gaps(measured) + (slowest,) * 9)[find_span(at)] * (min(stop, at + 1) - at)
            for at in range(start, stop)
        )


def test_times_are_moving_averages_that_start_at_their_first_value() -> None:
    once = rates.record_prefill(Rates(), 1024, 10, 1000, concurrent=False)
    assert once == Rates(prefill=(0, 100))
    assert rates.record_prefill(once, 1024, 10, 5000, concurrent=False) == Rates(prefill=(0, 200))
    once = rates.record_load(Rates(), "host", 10, 1000, concurrent=False)
    assert once == Rates(loads={"host": 100})
    assert get_load_time(rates.record_load(once, "disk", 10, 10, concurrent=False), "disk") == 1


def test_what_both_sides_lose_by_each_other_is_kept_apart() -> None:
    alone = Rates(prefill=(100,), loads={"host": 10})
    assert rates.record_prefill(alone, 0, 10, 2000, concurrent=True) == evolve(alone, prefill_slowdown=1250)
    assert rates.record_prefill(alone, 0, 10, 500, concurrent=True) == evolve(alone, prefill_slowdown=1000)
    assert rates.record_load(alone, "host", 10, 10**9, concurrent=True).load_slowdown == (3 * 1000 + 64_000) // 4
    assert rates.record_load(alone, "disk", 10, 300, concurrent=True) == alone, "nothing to compare with"


def test_what_loads_sooner_beside_something_else_than_it_did_alone_takes_no_longer_alone() -> None:
    """Files that were read past the page cache at start are in it now."""
    known = Rates(prefill=(100,), loads={"disk": 100})
    assert rates.record_load(known, "disk", 10, 200, concurrent=True) == evolve(
        known, loads={"disk": 80}, load_slowdown=1000
    )
    for _ in range(20):
        known = rates.record_load(known, "disk", 10, 200, concurrent=True)
    assert 20 <= known.loads.get("disk", 0) <= 25


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": (-1,)},
        {"loads": {"disk": -1}},
        {"load_slowdown": -1},
        {"prefill": (1,) * 65},
    ],
)
def test_rates_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="impossible rates"):
        Rates(**wrong)


@pytest.mark.parametrize(("seen", "gains"), [(-1, (1,)), (1, (1, -1))])
def test_gains_of_copies_that_cannot_be_are_refused(seen: int, gains: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="impossible gains"):
        ClassGains(seen, gains)


# How the world learns them.


def folded(*events: Any, known: Rates = Rates()) -> Rates:  # noqa: B008 - frozen
    world = make_world(evolve(STORE, rates=known))
    for event in (Submitted(a_job()), PrefixFound(LeaseId(1), 20, "host"), *events):
        world, _ = advance(world, ForRequest(ONE, event))
    return world.rates


def test_a_restore_alone_tells_its_tiers_time() -> None:
    assert folded(BlocksRestored(0, 16, 99, ns=320)) == Rates(loads={"host": 20})
    assert folded(BlocksRestored(0, 16, 99)) == Rates(), "not measured"


def test_whole_chunks_tell_what_computing_takes_and_part_of_one_does_not() -> None:
    restored = BlocksRestored(0, 8, 99)
    assert folded(restored, PrefillAdvanced(16, ns=80), PrefillAdvanced(20, ns=9999)) == Rates(prefill=(10,))


def test_side_by_side_both_tell_how_much_they_lose() -> None:
    known = Rates(prefill=(100,), loads={"host": 100})
    after = folded(PrefillAdvanced(8, ns=1600), BlocksRestored(8, 20, 99, ns=1800), known=known)
    assert after == evolve(known, prefill_slowdown=1250, load_slowdown=1125)


def test_a_load_of_less_than_a_chunk_tells_nothing() -> None:
    assert folded(BlocksRestored(0, 4, 99, ns=320)) == Rates()


def test_what_is_not_tried_is_held_against_nobody_for_ever() -> None:
    """One read was far too slow: it is recomputed for a while, then tried again."""
    known = Rates(prefill=(100,), loads={"host": 100_000}, load_slowdown=2000)
    world, tries = make_world(evolve(STORE, rates=known)), 0
    for number in range(1, 1000):
        request = RequestId(number)
        world, _ = advance(
            world, ForRequest(request, Submitted(a_job(prompt=tuple(range(number * 100, number * 100 + 21)))))
        )
        world, _ = advance(world, ForRequest(request, PrefixFound(LeaseId(number), 20, "host")))
        tries = number
        if isinstance(world.requests[request], Restoring):
            break
        assert world.requests[request].prompt.miss_reason == "recompute_is_quicker"  # type: ignore[union-attr]
        world = evolve(make_world(world.settings), rates=world.rates)
    assert 20 < tries < 400
    assert world.rates.load_slowdown < known.load_slowdown


def test_a_factor_fades_to_none_while_nothing_is_split() -> None:
    rate = Rates(loads={"host": 10}, prefill_slowdown=3000, load_slowdown=3000)
    for _ in range(300):
        rate = rates.fade_untried(rate, "host", loaded=True)
    assert rate == Rates(loads={"host": 10}, prefill_slowdown=1000, load_slowdown=1000)


def test_what_was_measured_reaches_the_next_request() -> None:
    known = Rates(prefill=(1,), loads={"disk": 1000})
    for rates_now, then in ((Rates(), Restoring), (known, Prefilling)):
        world, _ = advance(make_world(STORE), ForRequest(ONE, Submitted(a_job())))
        world, _ = advance(evolve(world, rates=rates_now), ForRequest(ONE, PrefixFound(LeaseId(1), 20, "disk")))
        assert isinstance(world.requests[ONE], then)


@pytest.mark.parametrize(
    ("known", "rows", "took_ns", "after"),
    [
        ((), 1024, 10_240, (10,)),
        ((), 4096, 40_960, (10, 10, 10)),
        ((10, 20), 1024, 20_480, (12, 20)),
        ((10, 20, 40), 4096, 2 * (1024 * 10 + 1024 * 20 + 2048 * 40), (12, 25, 50)),
        ((10, 20, 40), 4096, 1024 * 10 + 1024 * 20 + 2048 * 40, (10, 20, 40)),
        ((10, 0, 40), 2048, 2 * 2048 * 10, (12, 20, 40)),  # the second one's is taken to be the first one's
    ],
    ids=["a chunk", "chunks", "a chunk, known", "chunks, twice as slow", "chunks, as expected", "one of them unknown"],
)
def test_what_several_chunks_take_says_of_each_what_was_expected_of_it(
    known: tuple[int, ...], rows: int, took_ns: int, after: tuple[int, ...]
) -> None:
    assert rates.record_prefill(Rates(known), 0, rows, took_ns, concurrent=False).prefill == after
