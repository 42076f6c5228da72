"""The next step of a request in a launch that goes on, and whether the launch may take it without asking the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve

from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState
from effects.all import EffectRequest, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId


def find_next_step(
    effect_request: EffectRequest, outcome: Outcome, slots: SlotTable, is_abandoned: Callable[[RequestId], bool]
) -> EffectRequest | None:
    """Return the effect request for a request's next step; None if the core has to decide first."""
    effect = effect_request.effect
    if not (isinstance(effect, RunDecode) and isinstance(outcome, Decoded)) or effect.steps <= 1:
        return None
    state = slots.find(effect.slot, effect_request.request)
    if isinstance(state, DeviceFailed) or outcome.tokens[-1] in state.stops or is_abandoned(effect_request.request):
        return None
    return make_next_step(effect_request, state, left) if (left := count_steps_left(effect, outcome)) > 0 else None


def find_next_steps(
    effect_requests: Sequence[EffectRequest],
    outcomes: Sequence[Outcome],
    slots: SlotTable,
    is_abandoned: Callable[[RequestId], bool],
) -> list[EffectRequest | None]:
    """Return the effect request for each request's next step; None where the core has to decide first."""
    pairs = zip(effect_requests, outcomes, strict=True)
    return [find_next_step(one, outcome, slots, is_abandoned) for one, outcome in pairs]


def count_steps_left(effect: RunDecode, outcome: Decoded) -> int:
    """Return `RunDecode.steps` of the step after this outcome; 0: the core has to decide first."""
    return effect.steps - (len(outcome.tokens) if outcome.proposed and effect.copying is not None else 1)


def make_next_step(effect_request: EffectRequest, state: SlotState, steps: int) -> EffectRequest:
    """Return the effect request for the next step of a request. steps: as in `RunDecode`, from that step on."""
    effect = effect_request.effect
    assert isinstance(effect, RunDecode), effect_request
    # Made for each token of each answer. `evolve` would take twice as long.
    following = RunDecode(
        effect.slot,
        state.valid,
        state.tokens[-1],
        limit_proposals(effect, steps),
        steps=steps,
        copying=effect.copying,
    )
    return EffectRequest(effect_request.request, following)


def limit_proposals(effect: RunDecode, steps: int) -> int:
    """Return how many tokens a draft may propose in the next step. Where text may be copied, `steps` counts tokens."""
    return min(effect.propose, steps - 1) if effect.propose and effect.copying is not None else effect.propose


def count_proposing_step(
    following: list[EffectRequest | None], outcomes: Sequence[Outcome]
) -> list[EffectRequest | None]:
    """Return the next steps after the steps that may still copy text are counted down (`Copying.steps`).

    They are counted down by one if the step of these outcomes had proposals. None stands for a request that cannot take
    a next step before the core has decided: it had none already, or no step with copies is left.

    following: the next step of each request, in the order of `outcomes`.
    """
    if not any(isinstance(outcome, Decoded) and outcome.proposed for outcome in outcomes):
        return following
    return [None if one is None else with_fewer_proposing_steps(one) for one in following]


def with_fewer_proposing_steps(following: EffectRequest) -> EffectRequest | None:
    """Return the step with one step with copies less to take; None if none would be left."""
    effect = following.effect
    if not isinstance(effect, RunDecode) or effect.copying is None:
        return following
    if effect.copying.steps <= 1:
        return None
    fewer = evolve(effect.copying, steps=effect.copying.steps - 1)
    return EffectRequest(following.request, evolve(effect, copying=fewer))
