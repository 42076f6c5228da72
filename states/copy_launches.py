"""Launches of decode steps where text is copied: which of them end for a copy, and how requests join the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from effects.all import EffectRequest
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId
from effects.stream import StopLaunch
from states import suffix_control
from states.events import EffectOutcome
from states.lane import Lane, join_waiting
from states.launch_choice import plan_proposals, with_decode_plan, with_launch_plan
from states.rates import Rates
from states.request_states import MayPropose, Speculating, State
from states.settings import Settings


def stop_to_copy(
    lane: Lane,
    outcomes: Sequence[EffectOutcome],
    requests: Mapping[RequestId, State],
    rates: Rates,
    settings: Settings,
) -> tuple[Lane, tuple[EffectRequest, ...]]:
    """Ask a launch to end after its current step if its outcomes brought a match and a copy would pay."""
    if not settings.max_copied:
        return lane, ()
    has_match = any(isinstance(one.outcome, Decoded) and one.outcome.matched for one in outcomes)
    if not has_match or not should_stop_to_copy(lane, requests, rates, settings):
        return lane, ()
    return evolve(lane, runs_unattended=False), (EffectRequest(lane.running[0].request, StopLaunch()),)


def should_stop_to_copy(lane: Lane, requests: Mapping[RequestId, State], rates: Rates, settings: Settings) -> bool:
    """Would a launch that runs unattended without proposals copy something if it ended now?

    This is asked whenever an outcome of such a launch brings a match.
    """
    if not (lane.runs_unattended and lane.last_was_decode and lane.running) or any(lane.plan.proposals):
        return False
    running = [with_proposable_tokens(one, requests) for one in lane.running]
    plan = plan_proposals(running, requests, rates, settings.batch_rows, proposing_steps=0)
    return plan.source == "suffix" and any(plan.proposals)


def with_proposable_tokens(effect_request: EffectRequest, requests: Mapping[RequestId, State]) -> EffectRequest:
    """Return a running decode step with the proposals that the request could have in its next one."""
    state = requests.get(effect_request.request)
    if not isinstance(state, Speculating) or not isinstance(state.speculation, MayPropose):
        return effect_request
    widest = suffix_control.find_widest(state.speculation.control)
    most = max(0, min(widest, state.answer.count_proposable(state.prompt.job)))
    return with_decode_plan(effect_request, most, steps=1)


def join_launch(
    lane: Lane, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Lane, dict[RequestId, State]]:
    """Make all waiting effects members of the running launch. Also returns the states that are to know its plan.

    Nothing is proposed in a launch that others join. So a request that joins proposes nothing, although it might have a
    match, and is charged for plain steps.
    """
    if not settings.max_copied:
        return join_waiting(lane), {}
    plain = tuple(
        with_decode_plan(one, 0, one.effect.steps) for one in lane.waiting if isinstance(one.effect, RunDecode)
    )
    joined = join_waiting(evolve(lane, waiting=plain))
    joined = evolve(joined, plan=evolve(joined.plan, proposals=(0,) * len(joined.running)))
    return joined, with_launch_plan(joined, requests)
