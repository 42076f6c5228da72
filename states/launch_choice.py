"""The choice of what a free lane launches next, and of the requests that are batched in that launch.

Problem. Decode steps should be frequent and even, prompts should be read soon, and a device is used best when many rows
go through one forward. These aims contradict each other, and a running launch cannot be taken back.

Idea. `choose_launch` is called when a lane is free. It applies these rules in order:

1. An effect that needs no work (a model that is loaded already) is answered at once.
2. All waiting decode steps form one batch, in order of arrival, up to `batch_rows`. A running launch grows by
   `lane.join_waiting` where `lane.can_join` allows it, so a rule about the batch belongs there, too.
3. Where the numerics allow it, the next rows of one prompt or several go with that batch in the same forward
   (`states/mixed_launch.py`).
4. Otherwise decode steps and everything else take turns. So a long prefill delays a decoding request by one chunk at
   most, and decode steps delay a prefill by one launch at most. The chunk is shorter where a step after it would come
   later than `Settings.latency_target_ns` (`choose_turn_rows`).
5. Where there is a draft, `states/speculation_control.py` plans how many tokens each member proposes. Where text is
   searched, `states/suffix_control.py` plans how many tokens each member copies instead, by the length of the match.
6. When nothing else waits, one launch may take several decode steps before it asks the core again
   (`choose_step_counts`).
7. Among prompts, the shortest goes first as a rule. Several prompts may share a launch (`may_share_launch`) and its
   forwards (`states/prompt_choice.py`).

Example. Requests 1 and 2 decode, and requests 3 (4,000 rows missing) and 4 (300 rows missing) are prefilled, with
chunks of 256 rows on one lane. The launches are: decode 1 and 2; 256 rows of request 4; decode 1 and 2; 44 rows of
request 4; decode 1, 2 and 4; 256 rows of request 3; and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import RunDecode, find_match_class
from effects.ids import PROMPTS, RequestId
from effects.prefill import RunPrefill
from states import copy_branches, residency, speculation_control, step_prices, suffix_control
from states.events import EffectOutcome
from states.lane import (
    Lane,
    can_launch,
    choose_lane,
    get_decode_effects,
    join_waiting,
    list_decode_steps,
    list_other_effects,
    may_go_along,
    remove_answered,
    start_launch,
    with_decode_plan,
)
from states.mixed_launch import UNLIMITED_STEPS, choose_joining, choose_mixed_chunks, start_mixed_launch
from states.prompt_choice import choose_other_effect, choose_prompts, count_chunks, shorten_prefill
from states.rates import Rates, estimate_prefill_time, find_span
from states.request_states import MayPropose, Speculating, State
from states.residency import Models
from states.sequences import round_down_to_block
from states.settings import DecisionContext, Settings
from states.speculation_plan import NO_PLAN, Plan, SpeculationControl
from states.step_prices import Shape

LaneChoice: TypeAlias = Launch | EffectOutcome | None

# Decode steps with proposals between two plain ones, so that the time of a plain step stays known. It is also the most
# steps that a launch in which a draft proposes takes unattended.
PLAIN_STEP_INTERVAL = 64
TURN_PARTS = 4  # a prefill that takes turns with decode steps has at least one part in this many of a chunk


def choose_launch(
    lane: Lane, models: Models, settings: Settings, requests: Mapping[RequestId, State], rates: Rates
) -> tuple[Lane, Models, LaneChoice]:
    """Choose what the lane does next; None: it is busy, or nothing waits. The module's docstring has the rules."""
    if not can_launch(lane):
        return lane, models, None
    for effect_request in lane.waiting:
        models, outcome = residency.answer_without_move(models, effect_request, settings.residency)
        if outcome is not None:
            return remove_answered(lane, effect_request), models, EffectOutcome(effect_request.request, outcome)
    decode_steps = list_decode_steps(lane.waiting)[: settings.batch_rows]
    others = list_other_effects(lane.waiting)
    lane_after_other, other = choose_other_effect(lane, others, requests) if others else (lane, None)
    copies_turn = False
    if decode_steps and other is not None:
        context = DecisionContext(settings, rates)
        after, chunks = choose_mixed_chunks(lane, others, len(decode_steps), requests, context)
        rules = plan_copy_rules(decode_steps, requests, settings, rates, 0) if settings.mixed_launches else NO_PLAN
        copies_turn = lane.turn == "prompts" and would_copy(decode_steps, requests, rules)
        if chunks and not copies_turn:
            ruled = with_copy_rules(decode_steps, decode_steps, rules)
            after, batch = start_mixed_launch(after, ruled, chunks, settings)
            return after, models, Launch(batch)
    if decode_steps and (other is None or not lane.last_was_decode or copies_turn):
        draft_is_lost = models["draft"].location == "lost"
        is_alone = copies_turn or len(lane.waiting) == len(decode_steps)
        batch, plan, step_count = plan_decode_launch(
            lane, decode_steps, settings, requests, rates, draft_is_lost=draft_is_lost, is_alone=is_alone
        )
        after = start_launch(lane, batch, plan, step_count)
        return evolve(after, turn="copies") if copies_turn else after, models, Launch(batch)
    assert other is not None
    if len(others) > 1 and may_share_launch(others, settings):
        lane_after_prompts, batch = choose_prompts(lane, others, requests, settings)
        return start_launch(lane_after_prompts, batch), models, Launch(batch)
    launched = shorten_prefill(other, choose_turn_rows(decode_steps, other, settings, rates)) if decode_steps else other
    if settings.mixed_launches and len(others) > 1:
        launched = shorten_prefill(launched, settings.chunk)
    can_stop = settings.prompt_lane_min_rows or settings.mixed_launches
    chunk_count = count_chunks(launched, settings) if can_stop else 1
    after = start_launch(lane_after_other, (launched,), step_count=chunk_count)
    return after, models, Launch((launched,))


def may_share_launch(others: Sequence[EffectRequest], settings: Settings) -> bool:
    """May these effects share a launch? On the prompt lane prompts may.

    Where prompts go along with decode steps, they may as well, except with positional state: what they wait for is the
    same lane, and its launches can be as long.
    """
    if settings.mixed_launches and not settings.stateful:
        return all(may_go_along(prompt.effect) for prompt in others)
    return choose_lane(settings, others[0].effect) == PROMPTS


def plan_decode_launch(
    lane: Lane,
    decode_steps: Sequence[EffectRequest],
    settings: Settings,
    requests: Mapping[RequestId, State],
    rates: Rates,
    *,
    draft_is_lost: bool,
    is_alone: bool,
) -> tuple[tuple[EffectRequest, ...], Plan, int]:
    """Return a batch of decode steps, its plan, and the most steps that any member may take without asking.

    is_alone: nothing else waits, or what waits will stop the launch after its first step.
    """
    plan = plan_proposals(
        decode_steps, requests, rates, settings.batch_rows, lane.proposing_steps, draft_is_lost=draft_is_lost
    )
    if is_alone:
        step_counts = choose_step_counts(get_decode_effects(decode_steps), plan, settings)
    else:
        step_counts = [1] * len(decode_steps)
    copying = plan.copying or (None,) * len(decode_steps)
    batch = tuple(
        with_decode_plan(decode_step, propose, steps, own)
        for decode_step, propose, steps, own in zip(decode_steps, plan.proposals, step_counts, copying, strict=True)
    )
    return batch, plan, max(step_counts)


def choose_turn_rows(
    decode_steps: Sequence[EffectRequest], other: EffectRequest, settings: Settings, rates: Rates
) -> int:
    """Return the most rows of a prefill that takes its turn with these decode steps.

    Rows and the step behind them take no longer than the latency target, as far as their times are known. But a narrow
    forward takes more time for each row, so the prefill has at least one part in TURN_PARTS of a chunk. Without steps,
    or where the bits of a row would depend on the rows of its chunk, it has a whole chunk.
    """
    rows = settings.chunk
    effect = other.effect
    if not (decode_steps and settings.latency_target_ns and settings.keep_decoded and isinstance(effect, RunPrefill)):
        return rows
    shape = get_step_shape(decode_steps)
    step_ns = step_prices.find_plain_time(rates.decode, shape.span, shape.members)
    least = max(settings.block_size, settings.chunk // TURN_PARTS)
    while rows >= 2 * least and (
        step_ns + estimate_prefill_time(rates, effect.start, effect.start + rows) > settings.latency_target_ns
    ):
        rows //= 2
    return round_down_to_block(settings, rows)


def choose_step_counts(decode_effects: Sequence[RunDecode], plan: Plan, settings: Settings) -> list[int]:
    """Choose how many steps each member may take without asking the core, or tokens if something may be copied.

    A member may take as many as it may have tokens, if every proposal were accepted. Where there is a draft, all
    members take the same number, which is at most the number of steps that the plan holds for.
    """
    if plan.copying:
        most = UNLIMITED_STEPS if any(plan.proposals) else plan.steps
        return [min(most, effect.steps) for effect in decode_effects]
    limits = [
        max(1, effect.steps // (1 + propose)) for effect, propose in zip(decode_effects, plan.proposals, strict=True)
    ]
    if settings.max_proposals:
        most = PLAIN_STEP_INTERVAL if any(plan.proposals) else plan.steps
        return [min(plan.steps, most, *limits)] * len(limits)
    return [min(plan.steps, limit) for limit in limits]


def plan_proposals(
    decode_steps: Sequence[EffectRequest],
    requests: Mapping[RequestId, State],
    rates: Rates,
    row_limit: int,
    proposing_steps: int,
    *,
    draft_is_lost: bool = False,
) -> Plan:
    """Plan what each decode step proposes, and for how many steps of its launch the plan holds (`Plan.steps`).

    A launch takes its steps without asking the core, so one plan holds for all of them. It may not hold too long: all
    prices are multiples of the time of a plain step, so that time is measured again and again.

    * If a draft proposes, it does so in every step. The plan holds for as many steps as the accounts can pay for even
      if no proposal is right. That is 16 at most (`REQUEST_MEMORY`), and one for a trial or an uncertain price. It ends
      before the next plain step, which comes after PLAIN_STEP_INTERVAL steps with proposals.
    * If there is a draft whose proposals do not pay, the plan holds until a trial is due, or until the accounts can pay
      for one more option.
    * If no draft proposes but text may be copied, steps without a match are plain ones. `Copying.steps` limits the
      others. The plan holds until copies that do not pay now are tried again, and at least for REVIEW_STEPS. If every
      class of matches is copied now or could never pay, it holds for good. The rule before this one may end it earlier.
    * If a plain step is due, or was never timed, nothing is proposed, and the plan holds for one step.

    row_limit: the most rows of a step, with its proposals; 0 is passed on if a plain step is due. proposing_steps:
    steps since the last plain one. If `StepPrices.plain_suspect` doubts its time, a plain step is due after one.
    """
    controls = [find_control(requests, decode_step) for decode_step in decode_steps]
    effects = get_decode_effects(decode_steps)
    has_draft = not draft_is_lost and any(control is not None and control.widths for control in controls)
    copies = any(control is not None and control.copy_widths for control in controls)
    reason = "draft_lost" if draft_is_lost and any(control is not None for control in controls) else ""
    plan = Plan((0,) * len(controls), reason=reason, steps=UNLIMITED_STEPS)
    if not (has_draft or copies):
        return plan  # no member can propose: no price matters
    shape = get_step_shape(decode_steps)
    if has_draft:
        candidates = [
            speculation_control.ProposalCandidate(
                effect.propose if control is not None and control.widths else 0, control
            )
            for effect, control in zip(effects, controls, strict=True)
        ]
        prices = step_prices.estimate_prices(rates.decode, shape.span, shape.members, row_limit)
        plain_is_due = proposing_steps >= PLAIN_STEP_INTERVAL or (proposing_steps and prices.plain_suspect)
        plan = speculation_control.plan_launch(candidates, prices, rates, 0 if plain_is_due else row_limit)
    if copies:
        copy_prices = copy_branches.estimate_copy_prices(rates, shape, row_limit)
        plain_is_due = proposing_steps >= PLAIN_STEP_INTERVAL or (proposing_steps and copy_prices.chains.plain_suspect)
        plan = suffix_control.plan_copies(plan, controls, copy_prices, rates, 0 if plain_is_due else row_limit)
    if not any(plan.proposals):
        return plan
    return evolve(plan, steps=min(plan.steps, PLAIN_STEP_INTERVAL - proposing_steps))


def join_launch(
    lane: Lane, requests: Mapping[RequestId, State], settings: Settings, rates: Rates
) -> tuple[Lane, tuple[EffectRequest, ...]]:
    """Let waiting effects join the running launch, all of them unless prompts go along. Returns them as launched.

    Where text may be copied, each decode step gets a rule as well. The launch copies nothing from then on, because its
    members are not those that it was planned for. But a match to copy from ends it, and the next launch copies.
    """
    joining = lane.waiting
    if settings.mixed_launches:
        lane, joining = choose_joining(lane, requests, DecisionContext(settings, rates))
    plan = lane.plan
    if settings.max_copied and list_decode_steps(joining):
        steps = list_decode_steps((*lane.running, *joining))
        # The other members keep the rules that they have: to plan for all of 16 takes .8 ms, for one of them .2 ms.
        rules = plan_copy_rules(steps, requests, settings, rates, len(list_decode_steps(lane.running)))
        # If nothing is worth copying, the rules of the other members are still those of the plan.
        plan = evolve(rules if rules.copying else plan, proposals=(0,) * (len(lane.running) + len(joining)))
        joining = with_copy_rules(joining, steps, rules)
    return join_waiting(lane, joining, plan), joining


def plan_copy_rules(
    steps: Sequence[EffectRequest], requests: Mapping[RequestId, State], settings: Settings, rates: Rates, start: int
) -> Plan:
    """Plan what these decode steps would copy, in a launch that copies nothing. The plan has no `copying` if nothing is
    worth it. Steps before `start` need no rule, and get one that copies nothing.

    A match to copy from ends such a launch. So a rule only says what is worth another launch, and what has not been
    measured is estimated.
    """
    controls = [find_control(requests, decode_step) for decode_step in steps]
    plan = Plan((0,) * len(steps), steps=UNLIMITED_STEPS)
    if not any(control and control.copy_widths for control in controls[start:]):
        return plan
    prices = copy_branches.estimate_copy_prices(rates, get_step_shape(steps), settings.batch_rows)
    prices = evolve(prices, chains=evolve(prices.chains, needs_plain_step=False))
    return suffix_control.plan_copies(plan, controls, prices, rates, settings.batch_rows, first=start)


def with_copy_rules(
    effect_requests: Sequence[EffectRequest], steps: Sequence[EffectRequest], plan: Plan
) -> tuple[EffectRequest, ...]:
    """Return effects with the rules that a plan has for them, if it has any. steps: those that it was made for."""
    rules = dict(zip((step.request for step in steps), plan.copying, strict=False))
    return tuple(
        with_decode_plan(effect_request, 0, effect_request.effect.steps, rules[effect_request.request])
        if isinstance(effect_request.effect, RunDecode) and effect_request.request in rules
        else effect_request
        for effect_request in effect_requests
    )


def would_copy(steps: Sequence[EffectRequest], requests: Mapping[RequestId, State], plan: Plan) -> bool:
    """Would one of these decode steps copy text now, by the rules of the plan?"""
    for decode_step, rule in zip(steps, plan.copying, strict=False):
        control = find_control(requests, decode_step)
        if rule is not None and control is not None:
            group = find_match_class(control.matched)
            if group >= 0 and rule.counts[group]:
                return True
    return False


def get_step_shape(decode_steps: Sequence[EffectRequest]) -> Shape:
    """Return what the time of a step of these requests depends on."""
    effects = get_decode_effects(decode_steps)
    proposed = sum([effect.propose for effect in effects])
    positions = sum([effect.position for effect in effects])
    return Shape(find_span(positions // len(effects)), len(effects), proposed and len(effects) + proposed)


def find_control(requests: Mapping[RequestId, State], effect_request: EffectRequest) -> SpeculationControl | None:
    """Return what is known of the request's proposals; None: it proposes nothing."""
    state = requests.get(effect_request.request)
    if isinstance(state, Speculating) and isinstance(state.speculation, MayPropose):
        return suffix_control.settle(state.speculation.control, len(state.answer.tokens))
    return None


def with_launch_plan(lane: Lane, requests: Mapping[RequestId, State]) -> dict[RequestId, State]:
    """Return the states of the launch's members that may propose, each with the plan and why it proposes nothing.

    The plan says what an outcome costs the request's account. All plans of plain steps say the same, so one may stay.
    """
    states = dict[RequestId, State]()
    # A mixed launch has more members than proposals: the rows of prompts, which come last.
    for effect_request, propose in zip(lane.running, lane.plan.proposals, strict=False):
        state = requests[effect_request.request]
        if isinstance(state, Speculating) and isinstance(state.speculation, MayPropose):
            if lane.plan.is_plain and not lane.plan.reason and state.speculation.control.plan.is_plain:
                continue
            reason = state.speculation.reason
            if lane.plan.reason and state.answer.count_proposable(state.prompt.job):
                reason = "" if propose else lane.plan.reason
            drafted = MayPropose(state.speculation.control.with_plan(lane.plan), reason)
            states[effect_request.request] = Speculating(state.slot_lease, state.prompt, drafted, state.answer)
    return states
