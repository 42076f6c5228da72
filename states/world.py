"""Every request at once, and what they share. The whole engine is one fold over events: `advance`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

from attrs import evolve, field, frozen

from effects.all import Effect, EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.experts import PlaceExperts
from effects.ids import ENGINE, MAIN, PROMPTS, DeviceFailed, LaneId, ModelName, RequestId, Side, SlotId, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed
from effects.pflash import CompressPrompt, PromptCompressed
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored
from effects.snapshot import SnapshotSaved
from effects.stream import Abandon, StopLaunch
from states import experts as placing
from states import lane as lanes
from states import launch_prices, page_growth, policy, rates, residency
from states import slots as seats
from states import speculation_control as control
from states.checkpoints import EMPTY
from states.events import (
    Admitted,
    Cancelled,
    Derived,
    Event,
    ExpertsUsed,
    External,
    ForEngine,
    ForModel,
    ForRequest,
    Happened,
    Rejected,
    SlotEmptied,
    SlotsLost,
    Submitted,
)
from states.experts import Residents
from states.lane import Answer, Lane
from states.machine import IllegalEvent, step
from states.rates import Rates
from states.request_states import (
    Compressing,
    Done,
    Early,
    New,
    Prefilling,
    Recovering,
    Restoring,
    Speculating,
    State,
    Waiting,
    Yielding,
)
from states.residency import Models, Residence
from states.settings import DecisionContext, Settings
from states.slots import Slot, Slots
from states.table import TABLE

Out: TypeAlias = EffectRequest | Launch


@frozen
class World:
    settings: Settings
    slots: Slots
    requests: Mapping[RequestId, State] = field(factory=dict[RequestId, State])
    lanes: Mapping[LaneId, Lane] = field(factory=lambda: {MAIN: Lane()})
    models: Models = field(factory=dict[ModelName, Residence])
    rates: Rates = field(factory=Rates)
    experts: Residents = field(factory=Residents)


def begin(settings: Settings) -> World:
    slots = Slots((Slot(),) * settings.slots, places=(EMPTY,) * settings.state_places)
    models, all_lanes = residency.boot(settings), lanes.lanes_of(settings)
    residents = placing.begin(settings.experts, settings.expert_places)
    return World(settings, slots, lanes=all_lanes, models=models, rates=settings.rates, experts=residents)


def advance(world: World, happened: Happened) -> tuple[World, tuple[Out, ...]]:
    """Let one event play out to the end. What comes back is for the executors, in order.

    A cancellation of a request that has left already changes nothing. Everything else that the table has no row for is
    a bug and raises IllegalEvent.
    """
    fold = Fold(world)
    match happened:
        case ForRequest(request, Cancelled()) if request not in world.requests:
            return world, ()
        case ForRequest(request, Submitted()) if fold.full():
            fold.play(request, Rejected(len(fold.slots.waiting)))
        case ForRequest(request, event):
            if not isinstance(event, External | Derived):
                fold.acknowledge(Answer(request, event))
            fold.play(request, event)
        case ForEngine(SlotsLost(slots)):
            fold.lose(slots)
        case ForEngine(ExpertsUsed(counts)):
            fold.used(counts)
        case ForModel(name, there):
            fold.models = residency.reached(fold.models, name, there=there)
    after = World(world.settings, fold.slots, fold.requests, fold.lanes, fold.models, fold.rates, fold.experts)
    return after, tuple(fold.out)


def hurried(world: World) -> bool:
    """Does anybody wait for a slot, perhaps for one whose rows are still being kept?"""
    return bool(world.slots.waiting)


def reading(world: World) -> bool:
    """Does anybody who has a slot wait for a first token?"""
    return any(
        isinstance(state, Early | Prefilling) or (isinstance(state, Speculating) and not state.answer.tokens)
        for state in world.requests.values()
    )


def crowded(world: World) -> bool:
    """Do prompts wait for another one to be read, beside decode steps?"""
    return PROMPTS in world.lanes and bool(world.lanes[PROMPTS].waiting)


class Fold:
    """One event and all that follows from it at once. Lives inside `advance` only."""

    def __init__(self, world: World) -> None:
        self.settings, self.slots, self.models = world.settings, world.slots, world.models
        self.requests, self.lanes, self.rates = dict(world.requests), dict(world.lanes), world.rates
        self.experts = world.experts
        self.out: list[Out] = []
        self.todo: deque[tuple[RequestId, Event]] = deque()

    def full(self) -> bool:
        """Everybody who waits, waits for a slot, which is never free while the queue is full, or else for pages."""
        free = any(slot.holder is None for slot in self.slots.slots)
        seated = free and self.slots.short.isdisjoint(self.slots.waiting)
        return not seated and len(self.slots.waiting) >= self.settings.max_queue

    def acknowledge(self, answer: Answer) -> None:
        """Take an outcome off its lane, or leave it to the table if it is the store's."""
        for number, lane in self.lanes.items():
            for ask in lane.running:
                if ask.request == answer.request and type(answer.outcome) in ask.effect.outcomes:
                    self.models = residency.acknowledged(self.models, ask, answer.outcome)
                    self.slots = seats.acknowledged(self.slots, ask, answer.outcome, self.requests)
                    # What a prompt's rows take while the device is at decode steps, too, is not what they take.
                    self.learn(None if lane.shared else ask.effect, answer, lane)
                    self.lanes[number] = lanes.answered(lane, answer, together=bool(self.settings.block))
                    return
        if not isinstance(answer.outcome, PrefixFound | PrefixMissed | BlocksRestored | SnapshotSaved | StoreFailed):
            raise IllegalEvent(f"nothing on a lane for request {answer.request} awaits {answer.outcome}")
        self.learn(None, answer, Lane())

    def learn(self, effect: Effect | None, answer: Answer, lane: Lane) -> None:
        """How long it took, if that says what it would take again."""
        state = self.requests.get(answer.request)
        match effect, answer.outcome:
            case RunPrefill(), PrefillAdvanced():
                beside = isinstance(state, Restoring) and state.loading
                self.rates = rates.computed(self.rates, effect, answer.outcome, self.settings.chunk, beside=beside)
            case None, BlocksRestored() if isinstance(state, Restoring):
                chunk, tokens = self.settings.chunk, self.settings.state_tokens
                beside = not self.settings.stateful and state.front > state.seat.restored
                self.rates = rates.loaded(self.rates, state.tier, answer.outcome, chunk, tokens, beside=beside)
            case CompressPrompt(), PromptCompressed(ns=ns) if ns and isinstance(state, Compressing):
                self.rates = rates.scored(self.rates, policy.scored_tokens(state.prompt), ns)
            case RunDecode(propose=propose), Decoded() as done:
                leads = lanes.leads(lane, answer.request)
                if done.ns and done.proposed == propose and leads and lanes.tells(lane, done.ns):
                    known = launch_prices.timed(self.rates.decode, lanes.shape(lane.running), done.ns)
                    self.rates = evolve(self.rates, decode=known)
                for _ in range(lanes.further(done) if self.settings.block and leads else 0):
                    self.rates = control.begun(self.rates, lane.plan)
                self.rates = control.settled(self.settings, self.rates, lane.plan, done)
            case _:
                pass

    def lose(self, slots: tuple[SlotId, ...]) -> None:
        for slot in dict.fromkeys(slots):
            if not 0 <= slot < len(self.slots.slots):
                raise IllegalEvent(f"there is no slot {slot} to be lost")
            self.slots = seats.forget(self.slots, slot)
            if (holder := self.slots.slots[slot].holder) is not None:
                self.todo.append((holder, SlotEmptied()))
        self.settle()

    def used(self, counts: tuple[int, ...]) -> None:
        if len(counts) != self.settings.experts or min(counts, default=0) < 0:
            raise IllegalEvent(f"{len(counts)} counts of {self.settings.experts} experts, or some below none")
        self.experts, moves = placing.moved(self.experts, counts)
        if moves:
            self.out.append(EffectRequest(ENGINE, PlaceExperts(moves)))

    def play(self, request: RequestId, event: Event) -> None:
        self.todo.append((request, event))
        self.settle()

    def settle(self) -> None:
        """React to what follows from it, too, until nothing does."""
        while self.todo:
            self.react(*self.todo.popleft())
            if not self.todo:
                self.launch()
            if not self.todo:
                self.admit()

    def react(self, request: RequestId, event: Event) -> None:
        before = self.requests.get(request, New())
        then = step(TABLE, before, event, DecisionContext(self.settings, self.rates))
        if isinstance(event, PrefixFound) and not getattr(then.state, "computing", False):
            self.rates = rates.untried(self.rates, event.tier, loaded=isinstance(then.state, Restoring))
        if isinstance(before, Waiting) and isinstance(event, Admitted):
            self.rates = policy.spared(DecisionContext(self.settings, self.rates), before.prompt)
        if isinstance(before, New) and isinstance(event, Submitted):
            self.slots = seats.enqueue(self.slots, request)
        if isinstance(then.state, Waiting) and isinstance(before, Recovering | Yielding):
            self.slots = seats.give_up(self.slots, request, before.remains.seat.slot)
        if isinstance(then.state, Done):
            self.requests.pop(request, None)
            self.slots = seats.leave_queue(self.slots, request)
            if then.state.remains is not None:
                self.slots = seats.release(self.slots, request, then.state.remains, self.settings)
        else:
            self.requests[request] = then.state
        for effect in then.effects:
            self.route(EffectRequest(request, effect))

    def route(self, ask: EffectRequest) -> None:
        """Queue it for the lane, or hand it on; a place in the queue is given up on the spot."""
        if isinstance(ask.effect, OpenSlot):
            self.slots, opening = seats.opened(self.slots, ask.effect)
            ask = EffectRequest(ask.request, opening)
        if ask.effect.outcomes and ask.effect.side is Side.DEVICE:
            number = lanes.lane_of(self.settings, ask.effect)
            self.lanes[number] = lanes.join(self.lanes[number], ask)
            return
        for number, lane in self.lanes.items() if isinstance(ask.effect, Abandon) else ():
            self.lanes[number], left = lanes.leave(lane, ask.request)
            if left:
                self.todo.append((ask.request, DeviceFailed("abandoned", "gave up its place in the queue")))
        self.out.append(ask)

    def launch(self) -> None:
        """Decided at launch, not when the effect was queued: by then the world may look different."""
        for number in self.lanes:
            while not self.todo and lanes.idle(self.lanes[number]) and self.launch_on(number):
                pass
            if lanes.joinable(self.lanes[number], self.settings):
                self.join(number)
            if lanes.held_up(lane := self.lanes[number]):
                self.lanes[number] = evolve(lane, alone=False)
                self.out.append(EffectRequest(lane.running[0].request, StopLaunch()))

    def launch_on(self, number: LaneId) -> bool:
        """False: there is nothing to do on this lane."""
        ready, held = self.grow(self.lanes[number])
        lane, self.models, chosen = lanes.choose(ready, self.models, self.settings, self.requests, self.rates)
        lane = lanes.with_asks(lane, (*held, *lane.waiting), lane.running) if held else lane
        match chosen:
            case Launch(asks):
                if self.settings.state_places and isinstance(asks[0].effect, RunPrefill):
                    self.slots, asks = seats.given(self.slots, asks[0], self.requests, self.settings)
                    lane = evolve(lane, running=asks)
                if self.settings.block and lane.decode_last:
                    self.rates = control.begun(self.rates, lane.plan)
                    self.requests |= lanes.told(lane, self.requests)
                self.out.append(Launch(asks, number))
            case Answer(request, outcome):
                self.todo.append((request, outcome))
            case None:
                return False
        self.lanes[number] = lane
        if PROMPTS in self.lanes and self.lanes[MAIN].running and self.lanes[PROMPTS].running:
            self.lanes[PROMPTS] = evolve(self.lanes[PROMPTS], shared=True)
        return True

    def join(self, number: LaneId) -> None:
        """Who waits for pages lets nobody pass."""
        ready, held = self.grow(self.lanes[number])
        if held:
            self.lanes[number] = lanes.with_asks(ready, (*held, *ready.waiting), ready.running)
            return
        self.lanes[number] = lanes.joined(ready)
        self.out.append(Launch(ready.waiting, number, joins=True))

    def grow(self, lane: Lane) -> tuple[Lane, tuple[EffectRequest, ...]]:
        """Pages for the decode steps that wait, and those for which there are none now."""
        if not self.settings.pages:
            return lane, ()
        ready, held = list[EffectRequest](), list[EffectRequest]()
        for ask in lane.waiting:
            self.slots, fitting = page_growth.grown(self.slots, ask, self.requests, self.settings)
            if fitting is None:
                held.append(ask)
            else:
                ready.append(fitting)
        if held:  # who waits for pages waits for the end of somebody, which a launch that goes on alone would not see
            ready = [page_growth.alone(ask, 1) for ask in ready]
        return lanes.with_asks(lane, tuple(ready), lane.running), tuple(held)

    def admit(self) -> None:
        seated = seats.admit(self.slots, self.requests, self.settings)
        if seated is not None:
            self.slots, request, admitted = seated
            self.todo.append((request, admitted))
        elif self.settings.pages:
            self.slots = page_growth.held_back(self.slots, self.requests, self.settings)
