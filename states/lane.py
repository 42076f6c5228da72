"""The queue of one device lane: which effects wait for the lane, and which are in the launch that it runs now.

Problem. A lane is one thread of a device, and it carries out one launch at a time. Several requests want it at once.
A decode step takes milliseconds and a long prefill takes seconds, so what runs next decides how long everybody waits.
The decision has to be a pure function of the events, because a trace is replayed by making all decisions again.

Idea. Effects are only queued when a transition asks for them. The choice is made when the lane is free, and not before:
by then more requests may wait, and they can go as one batch. `states/launch_choice.py` chooses; this module holds the
queue and follows a launch until its last outcome.

Life of a launch:

1. `enqueue_effect` appends an effect to `waiting`.
2. When nothing runs, `choose_launch` moves some waiting effects to `running` (`start_launch`).
3. A launch may run unattended: it does several decode steps, or several chunks of a prompt, without asking the core.
   Each outcome on the way says `more`. Its last outcome takes the member off `running` (`record_outcome`).
4. When an effect arrives while a launch runs unattended, one of three things happens. It joins the launch (`can_join`).
   Or it waits without stopping the launch: a prompt does so while others go along. Or the executor is asked
   once to stop the launch after its current step (`StopLaunch`). `runs_unattended` is False from then on.

Invariants, asserted in `states/invariants.py`:

* A request has at most one effect on all lanes together.
* A lane on which something waits is running, unless all that waits are decode steps without free pages.
* Nothing that waits needs an unattended launch to end (`is_blocking` is False between two events). Only prompts may
  wait during such a launch, while other prompts go along with it (`states/mixed_launch.py`).

Example. Requests 1 and 2 decode in one launch that runs unattended. Request 3 has finished its prefill and asks for its
first decode step. Its effect is enqueued, `can_join` holds, and the world sends `Launch(..., joins=True)`: request 3
takes part from the next step on. Had request 3 asked for a prefill, the world would have sent `StopLaunch` instead.
With `Settings.mixed_launches` the prefill joins as well, if its rows may go along and it is not the turn of copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import evolve, frozen

from effects.all import Effect, EffectRequest, Outcome
from effects.decode import Copying, Decoded, RunDecode
from effects.ids import MAIN, PROMPTS, LaneId, RequestId
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.prompt_compression import CompressPrompt
from effects.residency import LoadModel, UnloadModel
from states.events import EffectOutcome
from states.settings import Settings
from states.speculation_plan import NO_PLAN, Plan
from states.step_prices import UNIT

# Prompts that share a launch, or go along with its decode steps, have rows for this many forwards at most. The device
# has the second forward while the host hears of the first, which takes 1 to 10 ms where 64 requests are served. There
# are no more, because a prompt that comes waits for all of them.
FORWARDS = 2
# A prompt that ends in the first of these forwards takes so many rows besides: that of its last token, if it is kept,
# and that of its decode step in the second. Without them, a few rows of the prompt behind had a forward of their own.
ROWS_PER_END = 2


@frozen
class Lane:
    """The queue of one device thread, and the launch that it carries out now."""

    waiting: tuple[EffectRequest, ...] = ()  # in order of arrival
    running: tuple[EffectRequest, ...] = ()  # members of the launch whose last outcome has not come
    last_was_decode: bool = False  # the last launch was a batch of decode steps (mixed ones too)
    # Members of the last launch when it began, or when an effect last joined it. If members of a launch that may copy
    # text have ended since then, those that are left (`record_outcome`).
    member_count: int = 0
    proposing_steps: int = 0  # decode steps since the last one in which no request proposed anything
    plan: Plan = NO_PLAN  # of the last launch
    runs_unattended: bool = False  # the launch may take several steps without the core, and has not been asked to stop
    overtakes: int = 0  # times in a row that a shorter prompt went before the one that has waited longest
    shares_device: bool = False  # lane PROMPTS only: a launch of lane MAIN ran on the device during this one
    # Where text may be copied and prompts may go along with decode steps: whose turn the last launch was, if both
    # wanted it. `states/mixed_launch.py` has the reason. Empty: no launch took prompts along.
    turn: Literal["", "prompts", "copies"] = ""


def make_lanes(settings: Settings) -> dict[LaneId, Lane]:
    """Return the empty lanes that an engine with these settings has."""
    prompt_lanes = {PROMPTS: Lane()} if settings.prompt_lane_min_rows else {}
    return {MAIN: Lane(), settings.scorer_lane: Lane(), **prompt_lanes}


def choose_lane(settings: Settings, effect: Effect) -> LaneId:
    """Return the lane that carries out an effect.

    Wide prefills have a lane of their own, so that decode steps do not wait for them. Prefills whose logprobs are asked
    for stay on the main lane, where all other logits are computed. The prompt scorer may have a device of its own.
    """
    match effect:
        case RunPrefill(start=start, stop=stop, logprobs=-1) if 0 < settings.prompt_lane_min_rows < stop - start:
            return PROMPTS
        case CompressPrompt() | LoadModel("scorer") | UnloadModel("scorer"):
            return settings.scorer_lane
        case _:
            return MAIN


def enqueue_effect(lane: Lane, effect_request: EffectRequest) -> Lane:
    """Append an effect to the effects that wait for the lane."""
    return with_effect_requests(lane, (*lane.waiting, effect_request), lane.running)


def remove_abandoned(lane: Lane, request: RequestId) -> tuple[Lane, bool]:
    """Remove the effect of a request from the queue. False: the request had none there."""
    remaining = tuple(other for other in lane.waiting if other.request != request)
    return with_effect_requests(lane, remaining, lane.running), len(remaining) < len(lane.waiting)


def record_outcome(lane: Lane, answer: EffectOutcome, *, ends_together: bool) -> Lane:
    """Return the lane after an outcome of its launch. The lane is free once every member has had its last outcome.

    An outcome with `more` leaves its member in `running`, and any other outcome removes it. Two counts are kept, too:

    * `proposing_steps` grows with the first outcome of each step in which all counted members take part
      (`is_first_of_step`), unless all steps are plain. If only copies are proposed, a plain step sets it to 0
      (`count_proposing_steps`).
    * `member_count` follows `running` once members have ended, in a launch that may copy text or whose plan gives a
      reason for proposing nothing (`copies_were_considered`). So the steps of the other members are counted again.

    ends_together: there is a draft, so the first member that ends stops the launch for all, and it no longer runs
    unattended.
    """
    goes_on = isinstance(answer.outcome, (Decoded, PrefillAdvanced)) and answer.outcome.more
    if goes_on and lane.running[0].request != answer.request:
        return lane  # most outcomes end here: only those of a step's first member are counted
    step_change = 0
    if (lane.proposing_steps or lane.plan.copying) and is_first_of_step(lane, answer.request):
        step_change = count_proposing_steps(lane, answer.outcome) - lane.proposing_steps
    if goes_on:
        if copies_were_considered(lane) and len(lane.running) != lane.member_count:
            # Members have ended, and the others go on: their steps are counted again from the next one on.
            return evolve(lane, member_count=len(lane.running))
        return with_effect_requests(lane, lane.waiting, lane.running, step_change) if step_change else lane
    if lane.running[0].request == answer.request:  # members end in order as a rule, and there may be many
        running = lane.running[1:]
    else:
        running = tuple(other for other in lane.running if other.request != answer.request)
    after = with_effect_requests(lane, lane.waiting, running, step_change)
    return evolve(after, runs_unattended=False) if after.runs_unattended and ends_together else after


def copies_were_considered(lane: Lane) -> bool:
    """May the launch copy text, or does its plan give a reason for proposing nothing (`Plan.reason`)?

    The steps of such a launch are counted although members have ended. They bring the next trial nearer, or say how
    long ago the last plain step was.
    """
    return bool(lane.plan.copying or lane.plan.reason)


def count_proposing_steps(lane: Lane, outcome: Outcome) -> int:
    """Return `Lane.proposing_steps` after an outcome of a launch's first member.

    Where only copies are proposed, the outcome says whether its step was a plain one.
    """
    if not lane.plan.copying or any(lane.plan.proposals) or not isinstance(outcome, Decoded):
        return lane.proposing_steps + count_further_steps(outcome)
    return lane.proposing_steps + 1 if outcome.rows else 0


def count_further_steps(outcome: Outcome) -> int:
    """Count the steps that were not counted yet: those after the first step of this outcome.

    A launch that goes on has begun its next step already, so that step counts as well.
    """
    return outcome.steps - 1 + outcome.more if isinstance(outcome, Decoded) else 0


def with_effect_requests(
    lane: Lane, waiting: tuple[EffectRequest, ...], running: tuple[EffectRequest, ...], added_steps: int = 0
) -> Lane:
    """Return the lane with other queues. added_steps: to add to `proposing_steps`.

    This runs once or twice for every token of every answer. `evolve` would take three times as long.
    """
    return Lane(
        waiting,
        running,
        lane.last_was_decode,
        lane.member_count,
        lane.proposing_steps + added_steps,
        lane.plan,
        lane.runs_unattended,
        lane.overtakes,
        lane.shares_device,
        lane.turn,
    )


def can_launch(lane: Lane) -> bool:
    """Is the lane free while something waits for it?"""
    return bool(lane.waiting) and not lane.running


def is_blocking(lane: Lane) -> bool:
    """Does something wait for the end of a launch that runs unattended?

    Prompts that may go along with decode steps do not, while other prompts go along: their turn comes when rows of
    those were launched, and the launch need not end for it.
    """
    if not (lane.runs_unattended and lane.waiting and lane.running):
        return False
    effects = [effect_request.effect for effect_request in lane.waiting]
    return not list_prompts_along(lane) or not all(map(may_go_along, effects))


def list_prompts_along(lane: Lane) -> list[RunPrefill]:
    """Return the prefills whose rows go along with the decode steps of the running launch."""
    effects = [effect_request.effect for effect_request in lane.running]
    return [effect for effect in effects if isinstance(effect, RunPrefill) and effect.forward_rows]


def count_rows_taken(lane: Lane) -> int:
    """Count the rows of FORWARDS forwards that the prompts take which go along with the running launch."""
    return sum(effect.stop - effect.start + ROWS_PER_END for effect in list_prompts_along(lane))


def has_room_along(lane: Lane, settings: Settings) -> bool:
    """May one more prompt go along, behind those that do? `choose_mixed_chunk` says how many of its rows."""
    along = list_prompts_along(lane)
    if not along or not may_share_forwards(settings):
        return not along
    most = FORWARDS * (along[0].forward_rows - len(list_decode_steps(lane.running)))
    return count_rows_taken(lane) + settings.block_size <= most


def may_share_forwards(settings: Settings) -> bool:
    """May rows of several prompts go along in one forward? With positional state, it must move each of their states."""
    return not settings.stateful or settings.commits_per_segment


def may_go_along(effect: Effect) -> bool:
    """May the rows of this effect go through forwards with decode steps? Their logprobs would be lost there.

    The positional state that the slot has must not have to be kept before it moves.
    """
    return isinstance(effect, RunPrefill) and effect.logprobs < 0 and not effect.keeps_state_first


def can_join(lane: Lane, settings: Settings) -> bool:
    """May the waiting effects join the running launch, all but prompts whose turn to go along comes later?

    The answer is a condition and no promise. Decode steps do not join while one of them waits for pages
    (`Fold.join_launch`), and a prompt does not where a forward has no room for its rows (`choose_mixed_chunk`). If
    something is left that needs the launch to end (`is_blocking`), the world sends `StopLaunch`. So a new rule here
    needs its counterpart in `launch_choice.join_launch` and `mixed_launch.choose_joining`.

    Decode steps may join only where there is no draft: what each member proposes was chosen for the members of this
    launch, so such a launch keeps them to its end. Where text may be copied, a launch copies nothing from then on. With
    `Settings.mixed_launches` prompts can join as well, if there is room behind those that go along already
    (`has_room_along`), and unless it is the turn of copies.
    """
    if settings.max_proposals or not (lane.runs_unattended and lane.waiting and lane.running and lane.last_was_decode):
        return False
    others = list_other_effects(lane.waiting)
    prompts_join = settings.mixed_launches and lane.turn != "copies"
    if others and not (prompts_join and all(may_go_along(effect_request.effect) for effect_request in others)):
        return False
    joining_steps = len(lane.waiting) - len(others)
    free_rows = settings.batch_rows - len(list_decode_steps(lane.running))
    return joining_steps <= free_rows and (joining_steps > 0 or has_room_along(lane, settings))


def list_decode_steps(effect_requests: Iterable[EffectRequest]) -> list[EffectRequest]:
    """Return the decode steps among these effects."""
    return [effect_request for effect_request in effect_requests if isinstance(effect_request.effect, RunDecode)]


def get_decode_effects(decode_steps: Iterable[EffectRequest]) -> list[RunDecode]:
    """Return the effects of the requests that are decode steps."""
    return [effect_request.effect for effect_request in decode_steps if isinstance(effect_request.effect, RunDecode)]


def list_other_effects(effect_requests: Iterable[EffectRequest]) -> list[EffectRequest]:
    """Return the effects that are no decode steps, such as prefills."""
    return [effect_request for effect_request in effect_requests if not isinstance(effect_request.effect, RunDecode)]


def join_waiting(lane: Lane, joining: tuple[EffectRequest, ...], plan: Plan) -> Lane:
    """Make waiting effects members of the running launch. joining: those that join, as they are launched."""
    running = (*lane.running, *joining)
    # A request has one waiting effect at most.
    requests = {effect_request.request for effect_request in joining}
    waiting = tuple(effect_request for effect_request in lane.waiting if effect_request.request not in requests)
    return evolve(with_effect_requests(lane, waiting, running), member_count=len(running), plan=plan)


def start_launch(
    lane: Lane, effect_requests: tuple[EffectRequest, ...], plan: Plan = NO_PLAN, step_count: int = 1
) -> Lane:
    """Move effects from the queue to a launch. step_count: decode steps or chunks that it may take without asking."""
    # A request has one waiting effect at most.
    launched = {effect_request.request for effect_request in effect_requests}
    waiting = tuple(effect_request for effect_request in lane.waiting if effect_request.request not in launched)
    proposing_steps = lane.proposing_steps
    if any(plan.proposals):
        proposing_steps += 1
    elif plan.proposals and not plan.copying:
        proposing_steps = 0
    return Lane(
        waiting,
        effect_requests,
        last_was_decode=bool(plan.proposals),
        member_count=len(effect_requests),
        proposing_steps=proposing_steps,
        plan=plan,
        runs_unattended=step_count > 1,
        overtakes=lane.overtakes,
    )


def with_decode_plan(
    effect_request: EffectRequest, propose: int, steps: int, copying: Copying | None = None
) -> EffectRequest:
    """Return a decode step with the proposals, the steps and the rule for copies that were chosen for it."""
    effect = effect_request.effect
    assert isinstance(effect, RunDecode), effect_request
    if (effect.propose, effect.steps, effect.copying) == (propose, steps, copying):
        return effect_request
    chosen = RunDecode(
        effect.slot, effect.position, effect.token, propose, effect.checkpoint, steps, effect.pages, copying
    )
    return EffectRequest(effect_request.request, chosen)


def remove_answered(lane: Lane, effect_request: EffectRequest) -> Lane:
    """Remove one effect from the queue: its outcome is known without a launch."""
    waiting = tuple(other for other in lane.waiting if other is not effect_request)
    return with_effect_requests(lane, waiting, lane.running)


def is_first_of_step(lane: Lane, request: RequestId) -> bool:
    """Is this the first member of its step, and does every member still take part?

    The outcomes of a step come in the order of its members, so this member's outcome is the first one of each step.
    What is counted once a step is counted then.
    """
    return len(lane.running) == lane.member_count and lane.running[0].request == request


def is_time_comparable(lane: Lane, took_ns: int) -> bool:
    """Is this a time by which later steps may be judged?

    A trial, or a step before which the draft catches up, takes longer than others. Its time counts only if it is short.
    """
    return not lane.plan.charges_measured_time or UNIT * took_ns < lane.plan.price * lane.plan.plain_ns
