"""Every request at once, and what they share. The whole engine is one fold over events: `advance`.

Problem. Requests share slots, lanes, models and what is known of the machine's speed. An event of one request changes
what others may do: a decode step that ends frees a lane, and a request that ends frees a slot. All of that has to be
decided in one place, in a fixed order, and without looking at anything but the events. Then a trace of the events is
enough to make every decision again.

Idea. `World` is an immutable value. `advance(world, event)` returns the next world and the effects that executors carry
out, in order. Inside, a `Fold` lets one event play out to its end:

1. An outcome is first taken off its lane, and times are learned from it (`acknowledge`).
2. The request's transition is looked up in `states/table.py` and made (`react`). Its effects go to the queue of a lane,
   or to the output (`route_effect`). Outcomes that come at once go through 1 and 2 in turn (`take_outcomes`).
3. When no derived event is pending, free lanes launch what waits for them (`launch_lanes`). This may answer an effect
   at once, which is one more pending event.
4. When still nothing is pending, the next waiting request is admitted to a free slot (`admit_waiting`). That is an
   event of its own (`Admitted`).
5. This repeats until nothing is pending and no request can be admitted.
6. The pace of background work is decided again if what it rests on has changed (`update_pace`, `states/pacing.py`).

Invariants. `states/invariants.py` asserts what is true of every world between two events, for instance that slots and
requests agree about who holds what. Within `advance` they may be broken for a moment.

Example. `Decoded` arrives with the last token of request 1, while request 2 waits for a slot. The outcome leaves lane
MAIN. Request 1 emits its token and closes its stream; its slot is released. Then request 2 is admitted: `Admitted`
makes it open the slot and look up its prompt. The output is `EmitTokens`, `CloseStream`, `OpenSlot`, `FindPrefix`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

from attrs import evolve, field, frozen

from effects.all import Effect, EffectRequest, Launch
from effects.experts import MoveExperts
from effects.ids import ENGINE, MAIN, PROMPTS, DeviceFailed, LaneId, ModelName, RequestId, Side, SlotId, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel, UnloadModel
from effects.restore import BlocksRestored
from effects.snapshot import SnapshotSaved
from effects.stream import Abandon, StopLaunch
from states import copy_records, experts, pacing, policy, rates, residency, slot_admission, slots
from states import lane as lane_queue
from states.checkpoints import EMPTY
from states.events import (
    Admitted,
    Cancelled,
    Derived,
    EffectOutcome,
    Event,
    ExpertsUsed,
    External,
    ForEngine,
    ForLaunch,
    ForModel,
    ForRequest,
    Happened,
    Rejected,
    SlotEmptied,
    SlotsLost,
    Submitted,
    TimerElapsed,
)
from states.experts import Residents
from states.followers import hold_at_awaited_rows, list_launched_prefills, note_awaited_rows
from states.lane import Lane
from states.launch_choice import choose_launch, join_launch, with_launch_plan
from states.machine import IllegalEvent, step
from states.measured_rates import learn_from_outcome, teaches_times
from states.pacing import Pacing
from states.page_growth import grow_waiting_steps, mark_short_of_pages
from states.rates import Rates
from states.request_states import Done, New, Recovering, Restoring, State, Waiting, Yielding
from states.residency import Models, Residence
from states.settings import DecisionContext, Settings
from states.slots import Slot, Slots
from states.table import TABLE

Output: TypeAlias = EffectRequest | Launch
STORE_OUTCOMES = (PrefixFound, PrefixMissed, BlocksRestored, SnapshotSaved, StoreFailed)  # no lane has their effects


@frozen
class World:
    """Everything that decisions rest on, as one immutable value."""

    settings: Settings
    slots: Slots
    requests: Mapping[RequestId, State] = field(factory=dict[RequestId, State])
    lanes: Mapping[LaneId, Lane] = field(factory=lambda: {MAIN: Lane()})
    models: Models = field(factory=dict[ModelName, Residence])
    rates: Rates = field(factory=Rates)
    experts: Residents = field(factory=Residents)
    pacing: Pacing = field(factory=Pacing)


def make_world(settings: Settings) -> World:
    """Return the world before the first event."""
    return World(
        settings,
        Slots((Slot(),) * settings.slots, checkpoints=(EMPTY,) * settings.state_checkpoints),
        lanes=lane_queue.make_lanes(settings),
        models=residency.make_models(settings),
        rates=settings.rates,
        experts=experts.make_residents(settings.experts, settings.expert_slots),
    )


def advance(world: World, happened: Happened) -> tuple[World, tuple[Output, ...]]:
    """Let one event play out to its end. Returns the next world, and what executors carry out, in order.

    A cancellation of a request that has left already changes nothing. Any other event that the table has no row for is
    a bug and raises IllegalEvent.
    """
    fold = Fold(world)
    elapsed: TimerElapsed | None = None
    match happened:
        case ForRequest(request, Cancelled()) if request not in world.requests:
            return world, ()
        case ForRequest(request, Submitted()) if slot_admission.is_queue_full(fold.slots, fold.requests, fold.settings):
            fold.play_event(request, Rejected(len(fold.slots.waiting)))
        case ForRequest(request, event):
            if isinstance(event, External | Derived):
                fold.play_event(request, event)
            else:
                fold.take_outcomes((EffectOutcome(request, event),))
        case ForLaunch(outcomes):
            fold.take_outcomes(outcomes)
        case ForEngine(SlotsLost(slot_ids)):
            fold.lose_slots(slot_ids)
        case ForEngine(ExpertsUsed(counts)):
            fold.move_experts(counts)
        case ForEngine(TimerElapsed() as elapsed):
            pass
        case ForModel(name, there):
            fold.models = residency.record_process_change(fold.models, name, is_there=there)
    fold.update_pace(elapsed)
    after = World(
        world.settings, fold.slots, fold.requests, fold.lanes, fold.models, fold.rates, fold.experts, fold.pacing
    )
    return after, tuple(fold.outputs)


class Fold:
    """One event and all that follows from it at once. Lives inside `advance` only."""

    def __init__(self, world: World) -> None:
        self.settings = world.settings
        self.slots = world.slots
        self.models = world.models
        self.requests = dict(world.requests)
        self.lanes = dict(world.lanes)
        self.rates = world.rates
        self.experts = world.experts
        self.pacing = world.pacing
        self.demand = world.pacing.demand
        self.outputs: list[Output] = []
        self.pending: deque[tuple[RequestId, Event]] = deque()

    def take_outcomes(self, outcomes: tuple[EffectOutcome, ...]) -> None:
        """Take outcomes in order, at most one per request. Lanes launch and slots are given once all are taken."""
        awaited = {
            effect_request.request: (number, effect_request)
            for number, lane in self.lanes.items()
            for effect_request in lane.running
        }
        for answer in outcomes:
            number, effect_request = awaited.get(answer.request, (MAIN, None))  # store effects are on no lane
            if effect_request is not None and type(answer.outcome) in effect_request.effect.outcomes:
                self.acknowledge(answer, number, effect_request)
            elif isinstance(answer.outcome, STORE_OUTCOMES):
                self.learn_times(None, answer, Lane())
            else:
                raise IllegalEvent(f"nothing on a lane for request {answer.request} awaits {answer.outcome}")
            self.react(answer.request, answer.outcome)
        self.process_pending()

    def acknowledge(self, answer: EffectOutcome, number: LaneId, effect_request: EffectRequest) -> None:
        """Take an outcome off its lane and learn from it."""
        lane = self.lanes[number]
        match effect_request.effect:
            case LoadModel() | UnloadModel():
                self.models = residency.record_move(self.models, effect_request, answer.outcome)
            case RunPrefill():
                self.slots = slots.record_checkpoint(
                    self.slots, effect_request, answer.outcome, self.requests, self.settings
                )
        is_busy = number == MAIN and PROMPTS in self.lanes and bool(self.lanes[PROMPTS].running)
        if teaches_times(answer, lane, self.settings, is_prompt_lane_busy=is_busy):
            self.learn_times(effect_request.effect, answer, lane)
        self.lanes[number] = lane_queue.record_outcome(lane, answer, ends_together=bool(self.settings.max_proposals))

    def learn_times(self, effect: Effect | None, answer: EffectOutcome, lane: Lane) -> None:
        """Learn from an outcome how long things take. effect: what it answers; None: an effect of the store."""
        state = self.requests.get(answer.request)
        self.rates = learn_from_outcome(self.rates, effect, answer, lane=lane, state=state, settings=self.settings)

    def lose_slots(self, slot_ids: tuple[SlotId, ...]) -> None:
        """Forget the rows of these slots, and tell the requests that hold them."""
        for slot in dict.fromkeys(slot_ids):
            if not 0 <= slot < len(self.slots.slots):
                raise IllegalEvent(f"there is no slot {slot} to be lost")
            self.slots = slots.forget_rows(self.slots, slot)
            if (holder := self.slots.slots[slot].holder) is not None:
                self.pending.append((holder, SlotEmptied()))
        self.process_pending()

    def move_experts(self, counts: tuple[int, ...]) -> None:
        """Count the uses of experts, and move those to the device that are needed most. Raises IllegalEvent."""
        if len(counts) != self.settings.experts or min(counts, default=0) < 0:
            raise IllegalEvent(f"{len(counts)} counts of {self.settings.experts} experts, or some below none")
        self.experts, moves = experts.choose_moves(self.experts, counts)
        if moves:
            self.outputs.append(EffectRequest(ENGINE, MoveExperts(moves)))

    def play_event(self, request: RequestId, event: Event) -> None:
        self.pending.append((request, event))
        self.process_pending()

    def process_pending(self) -> None:
        """Process events until none is pending. Lanes launch and slots are given only while none is."""
        while True:
            while self.pending:
                self.react(*self.pending.popleft())
            self.launch_lanes()
            if not self.pending:
                self.admit_waiting()
            if not self.pending:
                return

    def react(self, request: RequestId, event: Event) -> None:
        """Make the request's transition, update what the requests share, and route the effects."""
        before = self.requests.get(request, New())
        transition = step(TABLE, before, event, DecisionContext(self.settings, self.rates))
        if isinstance(event, PrefixFound) and not getattr(transition.state, "computing", False):
            is_loaded = isinstance(transition.state, Restoring)
            self.rates = rates.fade_untried(self.rates, event.tier, loaded=is_loaded)
        if isinstance(before, Waiting) and isinstance(event, Admitted):
            self.rates = policy.fade_scorer_time(DecisionContext(self.settings, self.rates), before.prompt)
        if type(transition.state) is not type(before) or pacing.is_awaiting_first_token(before):
            self.demand = pacing.follow_transition(self.demand, request, before, transition.state)
        if isinstance(before, New) and isinstance(event, Submitted):
            self.slots = slots.enqueue(self.slots, request)
        if isinstance(transition.state, Waiting) and isinstance(before, Recovering | Yielding):
            self.slots = slots.requeue_holder(self.slots, request, before.remainder.slot_lease.slot)
        if isinstance(transition.state, Done):
            self.requests.pop(request, None)
            self.slots = slots.leave_queue(self.slots, request)
            if transition.state.remainder is not None:
                self.slots = slots.release_slot(self.slots, request, transition.state.remainder, self.settings)
        else:
            self.requests[request] = transition.state
        for effect in transition.effects:
            self.route_effect(EffectRequest(request, effect))

    def update_pace(self, elapsed: TimerElapsed | None) -> None:
        """Decide the pace of background work again if what it rests on has changed."""
        context = DecisionContext(self.settings, self.rates)
        is_slot_requested = slots.hurries_snapshots(self.slots, self.settings)
        demand = pacing.follow_queues(self.demand, is_slot_requested, self.lanes, self.requests, context)
        if demand is not self.pacing.demand or elapsed is not None:
            self.pacing, effects = pacing.decide_pace(self.pacing, demand, self.settings, elapsed)
            self.outputs += effects

    def route_effect(self, effect_request: EffectRequest) -> None:
        """Queue an effect for its lane, or put it out. `Abandon` also takes the request out of lane queues at once."""
        if isinstance(effect_request.effect, OpenSlot):
            self.slots, opening = slots.complete_open_slot(self.slots, effect_request.effect)
            effect_request = EffectRequest(effect_request.request, opening)
        if effect_request.effect.outcomes and effect_request.effect.side is Side.DEVICE:
            number = lane_queue.choose_lane(self.settings, effect_request.effect)
            self.lanes[number] = lane_queue.enqueue_effect(self.lanes[number], effect_request)
            return
        for number, lane in self.lanes.items() if isinstance(effect_request.effect, Abandon) else ():
            self.lanes[number], was_waiting = lane_queue.remove_abandoned(lane, effect_request.request)
            if was_waiting:
                failure = DeviceFailed("abandoned", "gave up its place in the queue")
                self.pending.append((effect_request.request, failure))
        self.outputs.append(effect_request)

    def launch_lanes(self) -> None:
        """Launch on each free lane. Let waiting effects join a launch that runs unattended, or have it end for them."""
        for number in [number for number, lane in self.lanes.items() if lane.waiting]:
            if not self.pending and lane_queue.can_launch(self.lanes[number]):
                self.launch_on_lane(number)
            if lane_queue.can_join(self.lanes[number], self.settings):
                self.join_launch(number)
            if lane_queue.is_blocking(lane := self.lanes[number]):
                self.lanes[number] = evolve(lane, runs_unattended=False)
                self.outputs.append(EffectRequest(lane.running[0].request, StopLaunch()))

    def launch_on_lane(self, number: LaneId) -> None:
        """Choose what a free lane does, and put it out, if it has anything to do."""
        self.slots, ready, held = grow_waiting_steps(self.slots, self.lanes[number], self.requests, self.settings)
        lane, self.models, chosen = choose_launch(ready, self.models, self.settings, self.requests, self.rates)
        lane = lane_queue.with_effect_requests(lane, (*held, *lane.waiting), lane.running) if held else lane
        match chosen:
            case Launch(launched):
                given = lane, launched, self.requests, self.settings
                self.slots, lane, launched = slots.assign_checkpoints(self.slots, *given)
                if (self.settings.max_proposals or self.settings.max_copied) and lane.last_was_decode:
                    self.rates = copy_records.record_launch_begin(self.rates, lane.plan)
                    self.requests |= with_launch_plan(lane, self.requests)
                self.outputs.append(Launch(launched, number))
            case EffectOutcome(request, outcome):
                self.pending.append((request, outcome))
            case None:
                return
        self.lanes[number] = lane
        if PROMPTS in self.lanes and self.lanes[MAIN].running and self.lanes[PROMPTS].running:
            self.lanes[PROMPTS] = evolve(self.lanes[PROMPTS], shares_device=True)

    def join_launch(self, number: LaneId) -> None:
        """Let waiting effects join the running launch. None joins while a decode step waits for pages."""
        self.slots, ready, held = grow_waiting_steps(self.slots, self.lanes[number], self.requests, self.settings)
        if held:
            self.lanes[number] = lane_queue.with_effect_requests(ready, (*held, *ready.waiting), ready.running)
            return
        lane, joining = join_launch(ready, self.requests, self.settings, self.rates)
        self.slots, lane, joining = slots.assign_checkpoints(self.slots, lane, joining, self.requests, self.settings)
        self.lanes[number] = lane
        self.requests |= with_launch_plan(self.lanes[number], self.requests) if self.settings.max_copied else {}
        if joining:
            self.outputs.append(Launch(joining, number, joins=True))

    def admit_waiting(self) -> None:
        """Give the next waiting request a slot, if there is one for it."""
        if not self.slots.waiting:
            return
        before = self.slots.follows
        context = DecisionContext(self.settings, self.rates)
        launched = list_launched_prefills(self.lanes.values())
        self.slots, admission = slot_admission.admit_next(self.slots, self.requests, launched, context)
        for request, follow in self.slots.follows.items():
            if follow != before.get(request) and not follow.ended:
                self.requests[follow.leader] = note_awaited_rows(self.requests[follow.leader], follow.awaited_rows)
                self.lanes[MAIN], stops = hold_at_awaited_rows(self.lanes[MAIN], follow, self.settings)
                self.outputs += [EffectRequest(follow.leader, StopLaunch())] if stops else []
        if admission is not None:
            self.pending.append(admission)
        elif self.settings.pages:
            self.slots = mark_short_of_pages(self.slots, self.requests, self.settings)
