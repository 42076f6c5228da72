"""The pace of background work: what each change of demand and each timer leads to, and that snapshots are taken."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise
from typing import Any

import pytest
from attrs import define, evolve, field

from effects.all import EffectRequest
from effects.decode import Decoded, RunDecode
from effects.ids import ENGINE, RequestId, SlotId
from effects.lookup import PrefixMissed
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.snapshot import SnapshotSaved
from effects.timer import StartTimer, TimerName
from states.events import Cancelled, Event, ForEngine, ForRequest, Submitted, TimerElapsed
from states.invariants import check_world
from states.machine import IllegalEvent
from states.pacing import (
    DELAYS_NS,
    MS,
    Demand,
    Pacing,
    SnapshotGate,
    Trimming,
    choose_step_interval,
    decide_pace,
    estimate_snapshot_worth,
)
from states.rates import Rates, TimedStep
from states.request_states import Prompt, RequestRemainder, SlotLease, Snapshotting
from states.settings import Settings
from states.world import advance, make_world
from tests.states.builders import ONE, PLAIN, STORE, TWO, a_job, is_of_pace

CLOSED, OPEN = PaceSnapshot(), PaceSnapshot(may_copy=True)
WAITS_MS = 250  # a snapshot, at most


def timer(name: TimerName, number: int) -> EffectRequest:
    return EffectRequest(ENGINE, StartTimer(name, number, DELAYS_NS[name]))


def elapsed(number: int, name: TimerName = "snapshot_quiet") -> TimerElapsed:
    return TimerElapsed(name, number)


def paced(
    demand: Demand, *, gate: SnapshotGate | None = None, trimming: Trimming | None = None, last: int = 9
) -> Pacing:
    return Pacing(demand, gate, trimming or Trimming(), last)


# --- the gate of a snapshot ---

SAVING = Demand(snapshots=(ONE,))
GIVING = SnapshotGate(ONE, "giving_way", patience_timer=2)
SETTLING = SnapshotGate(ONE, "settling", quiet_timer=1)
COPYING = SnapshotGate(ONE, "copying", pace=OPEN)


@pytest.mark.parametrize(
    ("gate", "changes", "number", "phase", "effects"),
    [
        (None, {}, 0, "settling", [timer("snapshot_quiet", 10)]),
        (None, {"first_tokens": 1}, 0, "giving_way", [timer("snapshot_patience", 10)]),
        (None, {"is_slot_requested": True}, 0, "copying", [EffectRequest(ONE, OPEN)]),
        (SETTLING, {}, 1, "copying", [EffectRequest(ONE, OPEN)]),
        (SETTLING, {}, 7, "settling", []),
        (SETTLING, {"first_tokens": 2}, 0, "giving_way", [timer("snapshot_patience", 10)]),
        (SETTLING, {"is_slot_requested": True, "first_tokens": 2}, 0, "copying", [EffectRequest(ONE, OPEN)]),
        (GIVING, {"first_tokens": 1}, 0, "giving_way", []),
        (GIVING, {"first_tokens": 1}, 2, "copying", [EffectRequest(ONE, OPEN)]),
        (GIVING, {}, 0, "settling", [timer("snapshot_quiet", 10)]),
        (COPYING, {}, 0, "copying", []),
        (
            COPYING,
            {"first_tokens": 1},
            0,
            "giving_way",
            [timer("snapshot_patience", 10), EffectRequest(ONE, CLOSED)],
        ),
        (evolve(COPYING, is_patience_over=True, patience_timer=2), {"first_tokens": 1}, 0, "copying", []),
        (evolve(COPYING, patience_timer=2), {"first_tokens": 1}, 0, "giving_way", [EffectRequest(ONE, CLOSED)]),
    ],
)
def test_a_snapshot_gives_way_to_first_tokens_and_lets_a_moment_pass_behind_them(
    gate: SnapshotGate | None, changes: dict[str, Any], number: int, phase: str, effects: list[EffectRequest]
) -> None:
    before = paced(SAVING if gate else Demand(), gate=gate)
    after, outs = decide_pace(before, evolve(SAVING, **changes), STORE, elapsed(number) if number else None)
    assert after.gate is not None
    assert after.gate.phase == phase
    assert list(outs) == effects


@pytest.mark.parametrize(
    ("others", "is_slot_requested", "pace"),
    [
        ((), False, PaceSnapshot(may_copy=True, may_grow=True)),
        ((), True, PaceSnapshot(may_copy=True, may_grow=True)),
        ((TWO,), False, PaceSnapshot(may_copy=True, may_grow=True, memory_wait_ns=0)),
        ((TWO,), True, PaceSnapshot(may_copy=True, may_grow=False, memory_wait_ns=0)),
    ],
)
def test_a_snapshot_that_others_wait_behind_waits_for_no_memory_and_pins_none_if_a_slot_is_wanted(
    others: tuple[RequestId, ...], is_slot_requested: bool, pace: PaceSnapshot
) -> None:
    before = paced(SAVING, gate=COPYING)
    demand = evolve(SAVING, snapshots=(ONE, *others), is_slot_requested=is_slot_requested)
    after, outs = decide_pace(before, demand, STORE)
    assert after.gate is not None
    assert after.gate.pace == pace
    assert outs == (() if pace == OPEN else (EffectRequest(ONE, pace),))


def test_a_snapshot_that_a_request_waits_for_waits_for_memory_as_long_as_its_rows_take_to_compute() -> None:
    """A row takes 10 us: 1,000 rows take 10 ms, which are rounded up to 12."""
    demand = evolve(SAVING, is_slot_requested=True)
    rates = evolve(Rates(), prefill=(10_000,))
    job = evolve(a_job(), prompt=tuple(range(1000)))
    state = Snapshotting(RequestRemainder(SlotLease(SlotId(0), valid_rows=1000), Prompt(job, job.prompt)))
    worth = estimate_snapshot_worth(state, rates)
    assert worth == 12_000_000
    after, outs = decide_pace(paced(SAVING, gate=COPYING), evolve(demand, snapshot_worth_ns=worth), STORE)
    assert outs == (EffectRequest(ONE, PaceSnapshot(may_copy=True, memory_wait_ns=worth)),)
    assert decide_pace(after, SAVING, STORE)[1] == (EffectRequest(ONE, OPEN),), "nobody waits any more"
    assert estimate_snapshot_worth(state, Rates()) is None, "no prompt has been timed yet"


def test_the_next_snapshot_begins_with_a_gate_of_its_own() -> None:
    spent = evolve(COPYING, is_patience_over=True, patience_timer=2)
    after, outs = decide_pace(paced(evolve(SAVING, snapshots=(ONE, TWO)), gate=spent), Demand(snapshots=(TWO,)), STORE)
    assert after.gate == SnapshotGate(TWO, "settling", quiet_timer=10)
    assert outs == (timer("snapshot_quiet", 10),)
    assert decide_pace(after, Demand(), STORE)[0].gate is None


# --- steps and memory ---


@pytest.mark.parametrize("backlog", [True, False])
def test_steps_keep_an_even_pace_while_a_prompt_waits_for_another_one(backlog: bool) -> None:
    before, now = Demand(has_prefill_backlog=not backlog), Demand(has_prefill_backlog=backlog)
    assert decide_pace(paced(before), now, PLAIN)[1] == (EffectRequest(ENGINE, PaceSteps(evenly=backlog)),)
    assert decide_pace(paced(now), now, PLAIN)[1] == ()


@pytest.mark.parametrize(
    ("target_ms", "members", "step_ms", "interval_ms"),
    [
        (0, 64, 9, 0),  # steps are never held back
        (40, 64, 0, 40),  # nothing is known of such a launch
        (40, 64, 9, 36),  # prompts have three quarters of the device already
        (40, 1, 4, 16),
        (40, 1, 4.2, 20),
        (40, 64, 11, 40),  # the target is what an answer may wait
        (1000, 64, 11, 44),
    ],
)
def test_steps_leave_prompts_most_of_the_device_as_far_as_the_latency_target_allows(
    target_ms: int, members: int, step_ms: float, interval_ms: int
) -> None:
    settings = evolve(PLAIN, latency_target_ns=target_ms * MS)
    times = (TimedStep(0, members, 0, int(step_ms * MS), 0),) if step_ms else ()
    running = [EffectRequest(RequestId(number), RunDecode(SlotId(0), 100, 1)) for number in range(1, members + 1)]
    assert choose_step_interval(settings, Rates(decode=times), running) == interval_ms * MS


def test_a_launch_without_decode_steps_says_nothing_about_how_long_a_step_takes() -> None:
    settings = evolve(PLAIN, latency_target_ns=40 * MS)
    assert choose_step_interval(settings, Rates(), [EffectRequest(ONE, RunPrefill(SlotId(0), 0, 9))]) == 40 * MS
    assert choose_step_interval(settings, Rates(), []) == 40 * MS


def test_another_interval_is_told_and_the_same_one_is_not() -> None:
    before = Demand(has_prefill_backlog=True, step_interval_ns=16 * MS)
    now = evolve(before, step_interval_ns=20 * MS)
    assert decide_pace(paced(before), now, PLAIN)[1] == (EffectRequest(ENGINE, PaceSteps(True, 20 * MS)),)
    assert decide_pace(paced(now), now, PLAIN)[1] == ()


def test_prompts_wait_for_each_other_where_they_have_a_lane_of_their_own() -> None:
    prompt_lane = evolve(PLAIN, prompt_lane_min_rows=8, chunk=16)
    two = submitted(TWO, salt="another")  # so that it does not follow the first one
    events = (submitted(ONE), two, (ONE, PrefillAdvanced(16)), (TWO, PrefillAdvanced(16)))
    assert steps_paced(prompt_lane, events) == [[], [True], [False], []]
    assert steps_paced(PLAIN, events[:2]) == [[], []], "they take turns with steps there"


def steps_paced(settings: Settings, events: tuple[tuple[RequestId, Event], ...]) -> list[list[bool]]:
    world, paces = make_world(settings), list[list[bool]]()
    for request, event in events:
        world, outs = advance(world, ForRequest(request, event))
        check_world(world)
        effects = [out.effect for out in outs if isinstance(out, EffectRequest)]
        paces.append([effect.evenly for effect in effects if isinstance(effect, PaceSteps)])
    return paces


@pytest.mark.parametrize("settings", [PLAIN, STORE])
def test_memory_is_pinned_gently_while_a_request_is_served(settings: Settings) -> None:
    serving = Demand(is_serving=True)
    begun = decide_pace(Pacing(), serving, settings)
    ended = decide_pace(begun[0], Demand(), settings)
    paces = [out.effect.gently for out in (*begun[1], *ended[1]) if isinstance(out.effect, PaceMemory)]
    assert paces == ([True, False] if settings.store else []), "without a store there is no such memory"


# --- trimming ---


@pytest.mark.parametrize(
    ("trimming", "is_serving", "number", "after", "effects"),
    [
        (Trimming(), False, 0, Trimming(), []),
        (Trimming(), True, 0, Trimming("counting", 10), [timer("trim_interval", 10)]),
        (Trimming("counting", 3), True, 0, Trimming("counting", 3), []),
        (Trimming("counting", 3), False, 0, Trimming("counting", 3), []),
        (Trimming("counting", 3), False, 4, Trimming("counting", 3), []),
        (Trimming("counting", 3), False, 3, Trimming(), [EffectRequest(ENGINE, TrimMemory())]),
        (Trimming("counting", 3), True, 3, Trimming("due", 10), [timer("trim_patience", 10)]),
        (Trimming("due", 4), True, 0, Trimming("due", 4), []),
        (Trimming("due", 4), False, 0, Trimming(), [EffectRequest(ENGINE, TrimMemory())]),
        (
            Trimming("due", 4),
            True,
            4,
            Trimming("counting", 10),
            [EffectRequest(ENGINE, TrimMemory()), timer("trim_interval", 10)],
        ),
    ],
)
def test_memory_goes_back_once_after_work_best_while_no_request_is_served(
    trimming: Trimming, is_serving: bool, number: int, after: Trimming, effects: list[EffectRequest]
) -> None:
    demand = Demand(is_serving)
    event = elapsed(number, "trim_interval") if number else None
    paced_after, outs = decide_pace(paced(demand, trimming=trimming), demand, PLAIN, event)
    assert paced_after.trimming == after
    assert list(outs) == effects


# --- in the world ---


def submitted(request: RequestId, **changes: Any) -> tuple[RequestId, Event]:
    return request, Submitted(a_job(**changes))


def test_a_timer_that_was_never_started_is_a_bug() -> None:
    for number in (0, -1, 1, 1 << 40):
        with pytest.raises(IllegalEvent, match=f"timer {number} was never started"):
            advance(make_world(PLAIN), ForEngine(elapsed(number)))


def test_the_demand_follows_a_request_from_its_first_event_to_its_last() -> None:
    world = make_world(STORE)
    job = a_job(prompt=tuple(range(9)), max_tokens=2)
    events = (Submitted(job), PrefixMissed("empty_store"), PrefillAdvanced(8), Decoded((7,)), Decoded((8,)))
    seen = list[tuple[bool, int, int]]()
    for event in (*events, SnapshotSaved(8, 1)):
        world, outs = advance(world, ForRequest(ONE, event))
        check_world(world)
        demand = world.pacing.demand
        seen.append((demand.is_serving, demand.first_tokens, len(demand.snapshots)))
    assert seen == [(True, 1, 0)] * 3 + [(True, 0, 0), (True, 0, 1), (False, 0, 0)]
    assert outs == (EffectRequest(ENGINE, PaceMemory(gently=False)),)


def test_a_decode_step_changes_nothing_of_the_pace() -> None:
    """It is decided anew for every request, and not for every token."""
    world = make_world(PLAIN)
    for event in (Submitted(a_job(prompt=(1, 2), max_tokens=9)), PrefillAdvanced(1), Decoded((7,))):
        world, _ = advance(world, ForRequest(ONE, event))
    after, outs = advance(world, ForRequest(ONE, Decoded((8,))))
    assert after.pacing is world.pacing
    assert not any(map(is_of_pace, outs))


def test_a_request_waits_for_a_slot_whose_snapshot_is_not_held_up() -> None:
    tight = evolve(STORE, slots=1)
    world = make_world(tight)
    job = a_job(prompt=tuple(range(9)), max_tokens=1)
    for event in (Submitted(job), PrefixMissed("empty_store"), PrefillAdvanced(8), Decoded((7,))):
        world, _ = advance(world, ForRequest(ONE, event))
    world, outs = advance(world, ForRequest(TWO, Submitted(job)))
    assert EffectRequest(ONE, OPEN) in outs
    world, outs = advance(world, ForRequest(TWO, Cancelled("client_gone")))
    assert not any(isinstance(out, EffectRequest) and out.effect == CLOSED for out in outs), "it goes on"


# --- over time ---


@define
class VirtualTime:
    """Carries out timers on a clock of its own, and notes when a snapshot may copy first and when memory is trimmed."""

    pacing: Pacing = field(factory=Pacing)
    now: int = 0
    due: list[tuple[int, int, TimerElapsed]] = field(factory=list["tuple[int, int, TimerElapsed]"])
    open_at: dict[RequestId, int] = field(factory=dict[RequestId, int])
    trims: list[int] = field(factory=list[int])

    def pass_time(self, ns: int) -> None:
        """Let the timers elapse that are due until then."""
        until = self.now + ns
        while self.due and self.due[0][0] <= until:
            self.now, _, event = heapq.heappop(self.due)
            self.change(self.pacing.demand, event)
        self.now = until

    def change(self, demand: Demand, event: TimerElapsed | None = None) -> None:
        self.pacing, outs = decide_pace(self.pacing, demand, STORE, event)
        for out in outs:
            match out.effect:
                case StartTimer(name, number, delay_ns):
                    heapq.heappush(self.due, (self.now + delay_ns, number, TimerElapsed(name, number)))
                case PaceSnapshot(may_copy=True):
                    self.open_at.setdefault(out.request, self.now)
                case TrimMemory():
                    self.trims.append(self.now)


@pytest.mark.parametrize("seed", range(60))
def test_every_snapshot_may_copy_after_a_quarter_of_a_second_at_the_latest(seed: int) -> None:
    """This holds whichever first tokens are waited for meanwhile, and however often."""
    rng, time = random.Random(seed), VirtualTime()
    saving, oldest_at = list[RequestId](), dict[RequestId, int]()
    for number in range(1, 400):
        time.pass_time(rng.choice((0, 1, 3, 9, 11, 30, 100)) * MS)
        if rng.random() < 0.1:
            saving.append(RequestId(number))
        if saving and saving[0] in time.open_at and rng.random() < 0.3:
            saving.pop(0)
        time.change(Demand(True, rng.random() < 0.05, rng.choice((0, 0, 1, 2)), False, tuple(saving)))
        for request in saving[:1]:
            oldest_at.setdefault(request, time.now)
    time.pass_time(WAITS_MS * MS)
    waits = [time.open_at[request] - since for request, since in oldest_at.items()]
    assert max(waits) <= WAITS_MS * MS
    assert len(waits) > 10


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_trimmed_within_75_seconds_of_work_and_once_a_minute_at_most(seed: int) -> None:
    rng, time, work = random.Random(seed), VirtualTime(), list[int]()
    for _ in range(60):
        time.pass_time(rng.choice((1, 5, 20, 70, 200)) * 1000 * MS)
        is_serving = rng.random() < 0.5
        work += [time.now] if is_serving else []
        time.change(Demand(is_serving))
    time.change(Demand())
    time.pass_time(75_000 * MS)
    assert all(later - earlier >= DELAYS_NS["trim_interval"] for earlier, later in pairwise(time.trims))
    assert all(any(at <= trim <= at + 75_000 * MS for trim in time.trims) for at in work)
    assert not time.due
    assert time.pacing.trimming == Trimming()
