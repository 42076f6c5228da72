"""The rates of the world after an outcome: what it teaches about how long things take.

The world calls this for every outcome of a launch and of the store. Only times that predict later ones are learned.
"""

from __future__ import annotations

from attrs import evolve

from effects.all import Effect
from effects.decode import Decoded, RunDecode
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.prompt_compression import CompressPrompt, PromptCompressed
from effects.restore import BlocksRestored
from states import copy_records, policy, rates, speculation_control, step_prices
from states.events import EffectOutcome
from states.lane import Lane, count_further_steps, is_first_of_step, is_time_comparable
from states.launch_choice import get_step_shape
from states.rates import Rates
from states.request_states import Compressing, MayPropose, Restoring, Speculating, State
from states.settings import Settings


def learn_from_outcome(
    known_rates: Rates,
    effect: Effect | None,
    answer: EffectOutcome,
    *,
    lane: Lane,
    state: State | None,
    settings: Settings,
) -> Rates:
    """Return the rates after an outcome. effect: what it answers; None: an effect of the store.

    state: of the request, before the outcome. lane: on which the effect ran, before the outcome.
    """
    match effect, answer.outcome:
        case RunDecode(propose=propose), Decoded() as decoded:
            is_first = is_first_of_step(lane, answer.request)
            known_rates = learn_from_decode(known_rates, propose, decoded, lane, settings, is_first=is_first)
            if decoded.copied and isinstance(state, Speculating):
                return learn_from_copies(known_rates, decoded, state, lane, settings)
            return known_rates
        case RunPrefill(), PrefillAdvanced():
            concurrent = isinstance(state, Restoring) and state.loading
            return rates.learn_prefill(known_rates, effect, answer.outcome, settings.chunk, concurrent=concurrent)
        case None, BlocksRestored() if isinstance(state, Restoring):
            concurrent = not settings.stateful and state.load_start > state.slot_lease.reused_rows
            return rates.learn_load(
                known_rates, state.tier, answer.outcome, settings.chunk, settings.state_tokens, concurrent=concurrent
            )
        case CompressPrompt(), PromptCompressed(ns=ns) if ns and isinstance(state, Compressing):
            return rates.record_scoring(known_rates, policy.count_scored_tokens(state.prompt), ns)
        case _:
            return known_rates


def teaches_times(answer: EffectOutcome, lane: Lane, settings: Settings, *, is_prompt_lane_busy: bool) -> bool:
    """Return whether anything is learned from an outcome: its time, and how well proposals did.

    answer: of a launch on this lane. is_prompt_lane_busy: the launch runs decode steps while the prompt lane computes a
    prompt.

    A launch that shares the device with a launch of another lane takes longer than it would take alone. Nothing is
    learned from it. All members of a decode step report the same time, so of a plain step only the first member's
    outcome counts. If a draft proposed or text was copied, every member's outcome counts, because members differ in how
    many proposals are accepted.
    """
    # `Settings` refuses a prompt lane together with a draft, so the last condition only repeats that.
    if lane.shares_device or (is_prompt_lane_busy and not settings.max_proposals):
        return False
    outcome = answer.outcome
    # `Decoded.rows` is 0 if no member copied text.
    is_plain_step = isinstance(outcome, Decoded) and not outcome.rows and not any(lane.plan.proposals)
    return not is_plain_step or is_first_of_step(lane, answer.request)


def learn_from_decode(
    known_rates: Rates, propose: int, decoded: Decoded, lane: Lane, settings: Settings, *, is_first: bool
) -> Rates:
    """Return the rates after decode steps: what a step takes, and how well proposals do.

    is_first: this is the outcome of the step's first member. Every member reports the time of the same step, so only
    that report is learned.
    """
    decode = known_rates.decode
    if is_first and decoded.ns and is_time_comparable(lane, decoded.ns):
        shape = get_step_shape(lane.running)
        if decoded.rows:
            # A step in which other members ask a draft takes longer than its copies.
            if lane.plan.copies_alone or len(lane.running) == 1:
                shape = evolve(shape, rows=decoded.rows)
                known_rates = copy_records.record_copy_time(known_rates, shape, decoded.ns, branched=decoded.branched)
        elif decoded.proposed == propose:
            decode = step_prices.record_step_time(decode, shape, decoded.ns)
    further_steps = count_further_steps(decoded) if is_first else 0
    if (settings.max_proposals or settings.max_copied) and not (decoded.rows or any(lane.plan.proposals)):
        count = decoded.steps if is_first and lane.plan.copies_alone else further_steps
        return copy_records.record_plain_steps(known_rates, lane.plan, count, decode)
    if decode is not known_rates.decode:
        known_rates = known_rates.with_decode_times(decode)
    if not (settings.max_proposals or settings.max_copied):
        return known_rates  # the rest is what is learned of proposals
    if is_first:
        known_rates = copy_records.record_further_steps(known_rates, lane.plan, decoded, further_steps)
    return speculation_control.record_speculation_outcome(settings, known_rates, lane.plan, decoded)


def learn_from_copies(
    known_rates: Rates, decoded: Decoded, state: Speculating, lane: Lane, settings: Settings
) -> Rates:
    """Return the rates after a step in which this request copied. state: its state before the outcome."""
    speculation = state.speculation
    if not isinstance(speculation, MayPropose):
        return known_rates
    return copy_records.record_copies(settings, known_rates, speculation.control, decoded, lane.member_count)
