"""The device lane: who waits for it, who is on it, what is launched next and with whom it is batched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from effects.all import Effect, EffectRequest, Launch, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, PROMPTS, LaneId, RequestId
from effects.pflash import CompressPrompt
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import LoadModel, UnloadModel
from states import launch_prices, residency
from states import speculation_control as control
from states.launch_prices import UNIT, Shape
from states.rates import Rates, span_of
from states.request_states import Drafted, Prefilling, Restoring, Speculating, State
from states.residency import Models
from states.settings import Settings
from states.speculation_control import NOBODY, Plan


@frozen
class Answer:
    """An outcome that the core knows without asking anyone."""

    request: RequestId
    outcome: Outcome


@frozen
class Lane:
    waiting: tuple[EffectRequest, ...] = ()  # in order of arrival
    running: tuple[EffectRequest, ...] = ()  # members of the launch that have not answered
    decode_last: bool = False  # the last launch was a batch of decode steps
    members: int = 0  # of the last launch
    proposing: int = 0  # launches since one in which nobody proposed anything
    plan: Plan = NOBODY  # of the last launch
    alone: bool = False  # it may go on by itself, and was not told yet that others wait
    passed: int = 0  # turns in which a shorter prompt went before the one that has waited longest
    shared: bool = False  # of lane PROMPTS: the device has been at decode steps, too, while it was at this launch


Chosen: TypeAlias = Launch | Answer | None

OFTEN = 64  # steps with proposals; then comes a plain one, so that what they are compared with stays true
PROMPT = 8  # rows of a mixed forward for each decode step in it, at least
PASSED = 2  # turns of shorter prompts; then comes the one that has waited longest, so that long ones get on, too


def lanes_of(settings: Settings) -> dict[LaneId, Lane]:
    """Nothing waits for any of them."""
    beside = {PROMPTS: Lane()} if settings.beside_rows else {}
    return {MAIN: Lane(), settings.drafter_lane: Lane(), **beside}


def lane_of(settings: Settings, effect: Effect) -> LaneId:
    """Which device an effect is for, a second one is a place in the settings; and whether it goes beside what else that
    is at: a prompt's rows are, where they are many, so that those who decode do not wait for them. What logits are to
    tell about them is made where all other logits are.
    """
    match effect:
        case RunPrefill(start=start, stop=stop, logprobs=-1) if 0 < settings.beside_rows < stop - start:
            return PROMPTS
        case CompressPrompt() | LoadModel("drafter") | UnloadModel("drafter"):
            return settings.drafter_lane
        case _:
            return MAIN


def join(lane: Lane, ask: EffectRequest) -> Lane:
    return with_asks(lane, (*lane.waiting, ask), lane.running)


def leave(lane: Lane, request: RequestId) -> tuple[Lane, bool]:
    """Give up a place in the queue; False if there was none to give up."""
    stays = tuple(ask for ask in lane.waiting if ask.request != request)
    return with_asks(lane, stays, lane.running), len(stays) < len(lane.waiting)


def answered(lane: Lane, answer: Answer, *, together: bool) -> Lane:
    """One member of the launch is back, for good or only for now. The lane is free once all are for good. together: the
    others will be, too, and it goes no further.
    """
    on = further(answer.outcome) if leads(lane, answer.request) and lane.proposing else 0
    if isinstance(answer.outcome, Decoded | PrefillAdvanced) and answer.outcome.more:
        return with_asks(lane, lane.waiting, lane.running, on) if on else lane
    running = tuple(ask for ask in lane.running if ask.request != answer.request)
    after = with_asks(lane, lane.waiting, running, on)
    return evolve(after, alone=False) if after.alone and together else after


def further(outcome: Outcome) -> int:
    """Steps that a launch has begun beyond the first of those that it tells of: the one that it is at counts."""
    return outcome.steps - 1 + outcome.more if isinstance(outcome, Decoded) else 0


def with_asks(
    lane: Lane, waiting: tuple[EffectRequest, ...], running: tuple[EffectRequest, ...], proposing: int = 0
) -> Lane:
    """As `evolve`, which takes three times as long: once or twice for every token of every answer. proposing: so many
    launches more.
    """
    proposing += lane.proposing
    plan, alone, passed, shared = lane.plan, lane.alone, lane.passed, lane.shared
    return Lane(waiting, running, lane.decode_last, lane.members, proposing, plan, alone, passed, shared)


def idle(lane: Lane) -> bool:
    """Is it free, and something waits for it?"""
    return bool(lane.waiting) and not lane.running


def held_up(lane: Lane) -> bool:
    """Does something wait for a launch that would go on by itself?"""
    return lane.alone and bool(lane.waiting and lane.running)


def joinable(lane: Lane, settings: Settings) -> bool:
    """May those who wait go on with the launch that is running? Where it goes on by itself, nobody waits for anything
    but the next token, and nobody proposes: that is decided for a company, which stays together.
    """
    plain = not settings.block and all(isinstance(ask.effect, RunDecode) for ask in lane.waiting)
    room = settings.batch_rows - len(lane.running)
    return held_up(lane) and lane.decode_last and plain and len(lane.waiting) <= room


def joined(lane: Lane) -> Lane:
    """All who waited are members now."""
    running = (*lane.running, *lane.waiting)
    return evolve(with_asks(lane, (), running), members=len(running))


def choose(
    lane: Lane, models: Models, settings: Settings, requests: Mapping[RequestId, State], rates: Rates
) -> tuple[Lane, Models, Chosen]:
    """What to do next, decided when the lane is free and not before.

    What needs no work is answered first. Decode steps go with the next rows of a prompt in one forward where that may
    be (`beside`). Otherwise they and everything else take turns, so a long prefill delays a decoding neighbour by one
    chunk at most, and the reverse. All decode steps that wait go as one batch, in order of arrival, up to `batch_rows`,
    each with as many proposals as pay in that company. Where nobody else waits they may go on alone for as many steps
    as nothing would be decided otherwise, and others may join them (`joinable`). Everything else goes in order of
    arrival, but of prompts the one that is done soonest (`following`). Of one that has the lane to itself several
    chunks are launched; beside decode steps they are given up as soon as somebody else's rows are to be computed.
    """
    if not idle(lane):
        return lane, models, None
    for ask in lane.waiting:
        models, outcome = residency.at_once(models, ask, settings.residency)
        if outcome is not None:
            return drop(lane, ask), models, Answer(ask.request, outcome)
    decode_steps = [ask for ask in lane.waiting if isinstance(ask.effect, RunDecode)]
    others = [ask for ask in lane.waiting if not isinstance(ask.effect, RunDecode)]
    company = decode_steps[: settings.batch_rows]
    passed, other = following(lane, others, requests) if others else (lane, None)
    if company and other is not None and (piece := beside(company, other, settings)) is not None:
        batch = (*(evolved(ask, one, 0, 1) for ask, one in zip(company, effects_of(company), strict=True)), piece)
        return mixed(passed, batch), models, Launch(batch)
    if company and (other is None or not lane.decode_last):
        if models["draft"].place == "lost":
            plan = Plan((0,) * len(company), reason="draft_lost", steps=OFTEN)
        else:
            plan = planned(company, requests, rates, settings.batch_rows, lane.proposing)
        effects = effects_of(company)
        steps = alone(effects, plan, settings) if len(lane.waiting) == len(company) else [1] * len(company)
        batch = tuple(
            ask if (one.propose, one.steps) == (propose, most) else evolved(ask, one, propose, most)
            for ask, one, propose, most in zip(company, effects, plan.proposals, steps, strict=True)
        )
        return start(lane, batch, plan, max(steps)), models, Launch(batch)
    assert other is not None
    turns = company or (settings.beside_rows and len(others) > 1)
    one = shortened(other, settings.chunk) if turns else other
    chunks = chunks_of(one, settings) if settings.beside_rows else 1
    return start(passed, (one,), steps=chunks), models, Launch((one,))


def beside(company: Sequence[EffectRequest], other: EffectRequest, settings: Settings) -> EffectRequest | None:
    """What of a prompt goes with these decode steps in one forward: as many rows as fill it, and most of them, so that
    it gets on. None: the two take turns. So they do where rows would depend on who else is in a forward, where a state
    stands behind one row of a forward only, and where somebody wants to know what a prompt's rows say.
    """
    effect = other.effect
    if not (settings.mixed_rows and isinstance(effect, RunPrefill)) or settings.stateful or effect.logprobs >= 0:
        return None
    forward = max(settings.mixed_rows, launch_prices.filled(PROMPT * len(company)))
    rows = min(forward, settings.chunk) - len(company)
    return shortened(other, rows) if rows > 0 else None


def mixed(lane: Lane, batch: tuple[EffectRequest, ...]) -> Lane:
    """The last of them is a prompt's. Nobody proposes, but it is no plain launch to compare others with."""
    return evolve(start(lane, batch, Plan((0,) * (len(batch) - 1))), proposing=lane.proposing)


def following(
    lane: Lane, others: Sequence[EffectRequest], requests: Mapping[RequestId, State]
) -> tuple[Lane, EffectRequest]:
    """Whose turn it is. Prompts that take turns all end late, and one that has been begun is soon a shorter one; but
    every so often the one that has waited longest comes first, whatever else arrives.
    """
    first = others[0]
    prompts = [ask for ask in others if isinstance(ask.effect, RunPrefill)]
    if not isinstance(first.effect, RunPrefill):
        return lane, first
    soonest = first if lane.passed >= PASSED else min(prompts, key=lambda ask: missing(requests, ask))
    return evolve(lane, passed=0 if soonest is first else lane.passed + 1), soonest


def missing(requests: Mapping[RequestId, State], ask: EffectRequest) -> int:
    """Rows of its prompt that are not there."""
    state = requests.get(ask.request)
    return state.prompt.target - state.seat.valid if isinstance(state, Prefilling | Restoring) else 0


def chunks_of(ask: EffectRequest, settings: Settings) -> int:
    """Forwards that it takes, where it is a prompt's."""
    effect = ask.effect
    return -(-(effect.stop - effect.start) // settings.chunk) if isinstance(effect, RunPrefill) else 1


def shortened(ask: EffectRequest, rows: int) -> EffectRequest:
    """Of a prompt's next rows so many at most: somebody waits who decodes."""
    effect = ask.effect
    if not isinstance(effect, RunPrefill) or effect.stop - effect.start <= rows:
        return ask
    return EffectRequest(ask.request, evolve(effect, stop=effect.start + rows, checkpoint=False))


def alone(effects: Sequence[RunDecode], plan: Plan, settings: Settings) -> list[int]:
    """Steps that each may take without asking: as many as it may have whatever is accepted; where there is a draft, as
    many as all may, for which the plan holds.
    """
    most = [max(1, one.steps // (1 + propose)) for one, propose in zip(effects, plan.proposals, strict=True)]
    return [min(plan.steps, OFTEN, *most)] * len(most) if settings.block else most


def evolved(ask: EffectRequest, one: RunDecode, propose: int, steps: int) -> EffectRequest:
    return EffectRequest(
        ask.request, RunDecode(one.slot, one.position, one.token, propose, one.checkpoint, steps, one.pages)
    )


def planned(
    decode_steps: Sequence[EffectRequest], requests: Mapping[RequestId, State], rates: Rates, limit: int, proposing: int
) -> Plan:
    """limit: of rows. proposing: steps since a plain one, which is then measured again."""
    controls = [control_of(requests, ask) for ask in decode_steps]
    if not any(controls):
        return Plan((0,) * len(controls), steps=OFTEN)  # nobody has a draft: no price matters
    company = shape(decode_steps)
    wanted = [(one.propose, member) for one, member in zip(effects_of(decode_steps), controls, strict=True)]
    offer = launch_prices.terms(rates.decode, company.span, company.members, limit)
    plan = control.share(wanted, offer, rates, 0 if proposing >= OFTEN or (proposing and offer.held_up) else limit)
    return evolve(plan, steps=min(plan.steps, OFTEN - proposing)) if any(plan.proposals) else plan


def leads(lane: Lane, request: RequestId) -> bool:
    """Once a step: is it who answers first, and for a whole company?"""
    return len(lane.running) == lane.members and lane.running[0].request == request


def tells(lane: Lane, ns: int) -> bool:
    """Is that what such launches usually take? Where the draft had to catch up they take less."""
    return not lane.plan.late or UNIT * ns < lane.plan.price * lane.plan.plain


def shape(decode_steps: Sequence[EffectRequest]) -> Shape:
    effects = effects_of(decode_steps)
    proposed = sum(one.propose for one in effects)
    positions = sum(one.position for one in effects)
    return Shape(span_of(positions // len(effects)), len(effects), proposed and len(effects) + proposed)


def effects_of(decode_steps: Sequence[EffectRequest]) -> list[RunDecode]:
    return [ask.effect for ask in decode_steps if isinstance(ask.effect, RunDecode)]


def drafted(requests: Mapping[RequestId, State], ask: EffectRequest) -> Drafted | None:
    state = requests.get(ask.request)
    if isinstance(state, Speculating) and isinstance(state.speculation, Drafted):
        return state.speculation
    return None


def control_of(requests: Mapping[RequestId, State], ask: EffectRequest) -> control.SpeculationControl | None:
    speculation = drafted(requests, ask)
    return None if speculation is None else speculation.control


def told(lane: Lane, requests: Mapping[RequestId, State]) -> dict[RequestId, State]:
    """Those of its requests that have a draft: what the launch costs them, and why they propose nothing."""
    knowing = dict[RequestId, State]()
    for ask, propose in zip(lane.running, lane.plan.proposals, strict=False):  # a prompt's rows come last
        state = requests[ask.request]
        if isinstance(state, Speculating) and isinstance(state.speculation, Drafted):
            tells = lane.plan.reason and state.answer.room(state.prompt.job)
            why = ("" if propose else lane.plan.reason) if tells else state.speculation.reason
            drafted = Drafted(evolve(state.speculation.control, plan=lane.plan), why)
            knowing[ask.request] = evolve(state, speculation=drafted)
    return knowing


def start(lane: Lane, asks: tuple[EffectRequest, ...], plan: Plan = NOBODY, steps: int = 1) -> Lane:
    leaving = {ask.request for ask in asks}  # a request waits with one ask at most
    waiting, proposing = tuple(ask for ask in lane.waiting if ask.request not in leaving), lane.proposing
    if plan.proposals:
        proposing = proposing + 1 if any(plan.proposals) else 0
    return Lane(waiting, asks, bool(plan.proposals), len(asks), proposing, plan, steps > 1, lane.passed)


def drop(lane: Lane, ask: EffectRequest) -> Lane:
    return with_asks(lane, tuple(other for other in lane.waiting if other is not ask), lane.running)
