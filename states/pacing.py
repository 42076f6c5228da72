"""Pace of background work: what the engine may do while requests are served, and when.

Problem. Some work serves no request that waits now. Snapshots are copied out of slots, host memory is pinned for them,
and free memory is given back to the system. That takes memory bandwidth, processors and the interpreter from requests.
And decode steps take the device from prompts that are computed at the same time. Whether such work may go on depends on
what all requests wait for. So it is decided here, and not where the work is done.

Idea. `Demand` is what the requests want now, as far as background work depends on it. The world keeps it up to date
(`follow_transition`, `follow_queues`) and calls `decide_pace` when it has changed or a timer has elapsed. That
returns the next `Pacing` and the effects that tell executors what has changed. Executors obey and never look:

* `PaceSteps`: while a prompt waits for the prompt lane, decode steps keep an even pace, and leave the device to the
  prompts as far as `Settings.latency_target_ns` allows (`choose_step_interval`).
* `PaceMemory`: host memory is pinned with pauses while any request is served.
* `PaceSnapshot`: what the oldest snapshot may do. Snapshots are taken one after the other, in the order in which they
  were asked for, so the others have to wait anyway.
* `TrimMemory`: free memory is given back after work, at most every `trim_interval` (`DELAYS_NS`), and best while no
  request is served.

The core has no clock. `StartTimer` is an effect, and `TimerElapsed` is the event that answers it. A timer is not
stopped: one whose number no state holds any more is ignored.

A snapshot's gate has three phases:

    start
      |
      v
    giving_way --(no first token is pending)--> settling --(snapshot_quiet has elapsed)--> copying
      ^                                            |                                          |
      +---------(a first token is pending)---------+------------------------------------------+

A new gate leaves `giving_way` in the same event if no first token is pending. A gate is `copying` at once in two
cases (`slots.hurries_snapshots`): a request waits for a slot or for pages, which the snapshot has, or half of the
spare slots are taken. Then it waits for host memory no longer than it would take to compute its rows again.
A client often sends its next request as soon as an answer ends: `settling` waits for that. The timer
`snapshot_patience` starts when the gate gives way to a first token for the first time. When it has elapsed, the gate
stays `copying`.

Invariants (`states/invariants.py` asserts them): the demand is what a recount over all requests finds. There is a gate
if and only if a snapshot is being taken, and it is that of the oldest one. A gate that is not `copying` waits for a
timer that runs, so every snapshot is copied in the end. Once it is the oldest, it waits 250 ms at most in all
(`DELAYS_NS`): up to `snapshot_quiet` = 10 ms before it gives way for the first time, and up to `snapshot_patience` =
240 ms from then on. Memory is due to be trimmed, or a timer for that runs, whenever a request is served.

Example. Request 1 has ended and is saved: its gate is `settling`. After 10 ms, `TimerElapsed` opens it:
`PaceSnapshot(may_copy=True)`. Request 2 arrives and waits for its first token: `PaceSnapshot(may_copy=False)`, and the
saver stops behind the run that it copies. The first token comes: 10 ms later the gate is open again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import define, evolve, field, frozen

from effects.all import Effect, EffectRequest
from effects.ids import ENGINE, MAIN, PROMPTS, LaneId, RequestId
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.timer import StartTimer, TimerName
from states import step_prices
from states.events import TimerElapsed
from states.lane import Lane, get_decode_effects
from states.launch_choice import get_step_shape
from states.machine import IllegalEvent
from states.rates import Rates, estimate_prefill_time
from states.request_states import (
    Compressing,
    LoadingScorer,
    LookingUp,
    Prefilling,
    Restoring,
    Snapshotting,
    Speculating,
    State,
    UnloadingScorer,
    UnparkingDraft,
)
from states.settings import DecisionContext, Settings

MS = 1_000_000  # nanoseconds
DELAYS_NS: dict[TimerName, int] = {
    "snapshot_quiet": 10 * MS,
    "snapshot_patience": 240 * MS,  # after up to `snapshot_quiet`: a snapshot waits 250 ms at most in all
    # Trimming takes 20 ms, and what is wanted again is mapped anew page by page, some 15 MiB.
    "trim_interval": 60_000 * MS,
    # After that a trim holds requests up for its 20 ms: 0.03 % of the time, and a server that is never idle stays as
    # small as one that is.
    "trim_patience": 15_000 * MS,
}
STEP_SHARE = 4  # decode steps take one part in this many of the device while prompts wait, if the target allows it
INTERVAL_UNIT = 4 * MS
WITHOUT_TOKENS = frozenset(
    {LookingUp, Restoring, LoadingScorer, Compressing, UnloadingScorer, UnparkingDraft, Prefilling}
)

GatePhase: TypeAlias = Literal["giving_way", "settling", "copying"]
TrimPhase: TypeAlias = Literal["rested", "counting", "due"]


@frozen
class Demand:
    """The wishes of all requests now, as far as background work depends on them."""

    is_serving: bool = False  # there is any request
    # A request waits for a slot or for pages, perhaps for those that are being saved, or soon will.
    is_slot_requested: bool = False
    first_tokens: int = 0  # requests that hold a slot and wait for their first token
    has_prefill_backlog: bool = False  # prompts wait until another one has been computed on the prompt lane
    snapshots: tuple[RequestId, ...] = ()  # requests whose rows are being saved, in the order in which that was asked
    step_interval_ns: int = 0  # between two decode steps while there is a backlog
    # To compute the rows of the oldest snapshot again. None: no request waits for a slot, or the time is not known.
    snapshot_worth_ns: int | None = None


@frozen
class SnapshotGate:
    """The gate of the oldest snapshot. A timer's number is 0 while the gate does not wait for that timer."""

    request: RequestId
    phase: GatePhase = "giving_way"
    quiet_timer: int = 0
    patience_timer: int = 0  # started when it gives way for the first time
    is_patience_over: bool = False
    pace: PaceSnapshot = field(factory=PaceSnapshot)  # the last one that was put out


@frozen
class Trimming:
    """When free memory is given back: nothing has happened since (`rested`), after the timer, or as soon as possible.

    timer: that of the interval while `counting`, that of the patience while `due`.
    """

    phase: TrimPhase = "rested"
    timer: int = 0


@frozen
class Pacing:
    """The pace of all background work, and what it was decided from."""

    demand: Demand = field(factory=Demand)
    gate: SnapshotGate | None = None  # None: no snapshot is being taken
    trimming: Trimming = field(factory=Trimming)
    last_timer: int = 0  # the number of the timer that was started last


@define
class PaceOutput:
    """The effects of one decision, in order."""

    last_timer: int
    effects: list[EffectRequest] = field(factory=list[EffectRequest])

    def add(self, effect: Effect, request: RequestId = ENGINE) -> None:
        """Append an effect. request: the one that it is for; ENGINE if it is for none."""
        self.effects.append(EffectRequest(request, effect))

    def start_timer(self, name: TimerName) -> int:
        """Start a timer and return its number."""
        self.last_timer += 1
        self.add(StartTimer(name, self.last_timer, DELAYS_NS[name]))
        return self.last_timer


def is_awaiting_first_token(state: State) -> bool:
    """Does a request in this state hold a slot and wait for its first token?"""
    return type(state) in WITHOUT_TOKENS or (isinstance(state, Speculating) and not state.answer.tokens)


def follow_transition(demand: Demand, request: RequestId, before: State, after: State) -> Demand:
    """Return the demand after a request's transition."""
    change = is_awaiting_first_token(after) - is_awaiting_first_token(before)
    if change:
        demand = evolve(demand, first_tokens=demand.first_tokens + change)
    if isinstance(after, Snapshotting) and not isinstance(before, Snapshotting):
        return evolve(demand, snapshots=(*demand.snapshots, request))
    if isinstance(before, Snapshotting) and not isinstance(after, Snapshotting):
        return evolve(
            demand, snapshots=tuple(saved_request for saved_request in demand.snapshots if saved_request != request)
        )
    return demand


def follow_queues(
    demand: Demand,
    is_slot_requested: bool,
    lanes: Mapping[LaneId, Lane],
    requests: Mapping[RequestId, State],
    context: DecisionContext,
) -> Demand:
    """Return the demand after an event: the same object if no queue has changed, since this runs for every step."""
    is_serving = bool(requests)
    has_prefill_backlog = PROMPTS in lanes and has_several_prompts(lanes[PROMPTS])
    step_interval_ns = 0
    if has_prefill_backlog:
        step_interval_ns = choose_step_interval(context.settings, context.rates, lanes[MAIN].running)
    snapshot_worth_ns = None
    if is_slot_requested and demand.snapshots:
        snapshot_worth_ns = estimate_snapshot_worth(requests[demand.snapshots[0]], context.rates)
    if (
        is_serving == demand.is_serving
        and is_slot_requested == demand.is_slot_requested
        and has_prefill_backlog == demand.has_prefill_backlog
        and step_interval_ns == demand.step_interval_ns
        and snapshot_worth_ns == demand.snapshot_worth_ns
    ):
        return demand
    return evolve(
        demand,
        is_serving=is_serving,
        is_slot_requested=is_slot_requested,
        has_prefill_backlog=has_prefill_backlog,
        step_interval_ns=step_interval_ns,
        snapshot_worth_ns=snapshot_worth_ns,
    )


def estimate_snapshot_worth(state: State, rates: Rates) -> int | None:
    """Return how long it takes to compute the rows of a slot again that is being saved; None: it is not known.

    The time is rounded up to INTERVAL_UNIT, so that it changes seldom.
    """
    assert isinstance(state, Snapshotting), "no other state saves rows"
    worth_ns = estimate_prefill_time(rates, 0, state.remainder.slot_lease.valid_rows)
    return -(-worth_ns // INTERVAL_UNIT) * INTERVAL_UNIT or None


def has_several_prompts(lane: Lane) -> bool:
    """Do prompts wait until others have been computed, in the queue or behind them in the same launch?"""
    return bool(lane.waiting) or len(lane.running) > 1


def choose_step_interval(settings: Settings, rates: Rates, running: Sequence[EffectRequest]) -> int:
    """Return the nanoseconds from one decode step to the next one while prompts wait; 0: no more than steps take.

    A step of many requests costs little more than one of few. Delaying steps loses little: prompts finish sooner, and
    their answers then share each step. The target says how long an answer may wait for its next token. A quick step
    need not wait that long: an interval of 4 step times (STEP_SHARE) already leaves 3/4 of the device to prompts. The
    interval is rounded up to INTERVAL_UNIT, so that it changes seldom.

    running: members of the running launch.
    """
    if not settings.latency_target_ns or not get_decode_effects(running):
        return settings.latency_target_ns
    shape = get_step_shape(running)
    plain_ns = step_prices.find_plain_time(rates.decode, shape.span, shape.members)
    if not plain_ns:
        return settings.latency_target_ns
    wanted_ns = -(-STEP_SHARE * plain_ns // INTERVAL_UNIT) * INTERVAL_UNIT
    return min(settings.latency_target_ns, wanted_ns)


def decide_pace(
    pacing: Pacing, demand: Demand, settings: Settings, elapsed: TimerElapsed | None = None
) -> tuple[Pacing, tuple[EffectRequest, ...]]:
    """Return the pace that this demand asks for, and the effects that change it. elapsed: the event, if it is one.

    Raises IllegalEvent for a timer that was never started.
    """
    if elapsed is not None and not 1 <= elapsed.number <= pacing.last_timer:
        raise IllegalEvent(f"timer {elapsed.number} was never started")
    before = pacing.demand
    timer = 0 if elapsed is None else elapsed.number
    output = PaceOutput(pacing.last_timer)
    pace = (demand.has_prefill_backlog, demand.step_interval_ns)
    if pace != (before.has_prefill_backlog, before.step_interval_ns):
        output.add(PaceSteps(*pace))
    if settings.store and demand.is_serving != before.is_serving:
        output.add(PaceMemory(gently=demand.is_serving))
    gate = decide_gate(pacing.gate, demand, timer, output)
    trimming = decide_trimming(pacing.trimming, demand, timer, output)
    return Pacing(demand, gate, trimming, output.last_timer), tuple(output.effects)


def decide_gate(gate: SnapshotGate | None, demand: Demand, timer: int, output: PaceOutput) -> SnapshotGate | None:
    """Return the gate of the oldest snapshot. timer: the number of the timer that has just elapsed; 0: none has."""
    if not demand.snapshots:
        return None
    if gate is None or gate.request != demand.snapshots[0]:
        gate = SnapshotGate(demand.snapshots[0])
    gate = move_gate(gate, demand, timer, output)
    is_alone = len(demand.snapshots) == 1
    pace = PaceSnapshot(
        may_copy=gate.phase == "copying",
        may_grow=is_alone or not demand.is_slot_requested,
        memory_wait_ns=demand.snapshot_worth_ns if is_alone else 0,
    )
    if pace != gate.pace:
        output.add(pace, gate.request)
    return evolve(gate, pace=pace)


def move_gate(gate: SnapshotGate, demand: Demand, timer: int, output: PaceOutput) -> SnapshotGate:
    """Return the gate in its next phase. `SnapshotGate` names the phases. Starts the timers that it waits for."""
    if timer and timer == gate.patience_timer:
        gate = evolve(gate, is_patience_over=True)
    is_quiet = gate.phase == "settling" and timer == gate.quiet_timer
    if demand.is_slot_requested or gate.is_patience_over:
        return evolve(gate, phase="copying", quiet_timer=0)
    if demand.first_tokens:
        patience_timer = gate.patience_timer or output.start_timer("snapshot_patience")
        return evolve(gate, phase="giving_way", quiet_timer=0, patience_timer=patience_timer)
    if is_quiet:
        return evolve(gate, phase="copying", quiet_timer=0)
    if gate.phase == "giving_way":
        return evolve(gate, phase="settling", quiet_timer=output.start_timer("snapshot_quiet"))
    return gate


def decide_trimming(trimming: Trimming, demand: Demand, timer: int, output: PaceOutput) -> Trimming:
    """Return the next phase of trimming, and trim memory when that is due. timer: as in `decide_gate`."""
    is_over = timer != 0 and timer == trimming.timer
    if trimming.phase == "counting" and is_over:
        trimming = Trimming("due", 0 if not demand.is_serving else output.start_timer("trim_patience"))
        is_over = False
    if trimming.phase == "due" and (is_over or not demand.is_serving):
        output.add(TrimMemory())
        trimming = Trimming()
    if trimming.phase == "rested" and demand.is_serving:
        trimming = Trimming("counting", output.start_timer("trim_interval"))
    return trimming
