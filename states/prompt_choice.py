"""The choice among prompts that wait for a lane: which one goes first, and which go together in one launch.

Prompts do not take equal turns, or all of them would end late. The one goes first that will soonest be finished, or
soonest have the rows that a follower waits for. After MAX_OVERTAKES such turns the prompt that has waited longest goes
first, so that long prompts make progress, too. Where several prompts share a launch, each of them that goes before the
prompt that has waited longest counts as one turn.

While several prompts wait for the prompt lane, a launch has FORWARDS forwards at most. So it is where prompts go along
with decode steps (`states/mixed_launch.py`), but no request decodes. Such a launch has one of two forms:

* The first prompt asks for more rows than a chunk. It has the launch to itself, and gets FORWARDS chunks at most.
* The first prompt asks for a chunk or less. Then the prompts behind it go along while each asks for a chunk or less and
  the forwards have room. A prompt that asks for more is not cut: it ends the list. Rows that fit into one forward
  together share it (`effects.prefill.group_prefills`).

Example. Chunks have 256 rows, and prompts of 100, 120, 200 and 300 rows wait, the shortest first. The launch has two
forwards: the first one computes 100 and 120 rows, the second one 200 rows. The prompt of 300 rows goes in the next
launch, alone. Had the prompt of 300 rows waited longest, the first launch would have 100 and 120 rows only: both have
overtaken it, so it is its turn, and it ends the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from effects.all import EffectRequest
from effects.ids import RequestId
from effects.prefill import RunPrefill, group_prefills
from states.lane import FORWARDS, Lane
from states.request_states import Prefilling, Restoring, State
from states.settings import Settings

MAX_OVERTAKES = 2  # turns in a row in which a shorter prompt may go before the one that has waited longest


def choose_other_effect(
    lane: Lane, others: Sequence[EffectRequest], requests: Mapping[RequestId, State]
) -> tuple[Lane, EffectRequest]:
    """Choose one of the waiting effects that are no decode steps, and count the turns in which the first is overtaken.

    An effect that is no prompt goes when it is first in line. It overtakes nothing, and from then on nothing overtakes
    it. While a prompt is first in line, any waiting prompt may go, also one behind an effect that is no prompt.
    """
    first = others[0]
    if not isinstance(first.effect, RunPrefill):
        return lane, first
    prompts = [effect_request for effect_request in others if isinstance(effect_request.effect, RunPrefill)]
    if lane.overtakes >= MAX_OVERTAKES:
        chosen = first
    else:
        chosen = min(prompts, key=lambda prompt: count_missing_rows(requests, prompt))
    return evolve(lane, overtakes=0 if chosen is first else lane.overtakes + 1), chosen


def choose_prompts(
    lane: Lane, prompts: Sequence[EffectRequest], requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Lane, tuple[EffectRequest, ...]]:
    """Choose the prompts whose next rows go in one launch, in order, where several wait and may share a launch.

    The module's docstring has the rules.
    """
    rest = list(prompts)
    chosen = list[EffectRequest]()
    effects = list[RunPrefill]()
    while rest:
        after, next_prompt = choose_other_effect(lane, rest, requests)
        launched = next_prompt if chosen else shorten_prefill(next_prompt, FORWARDS * settings.chunk)
        effect = launched.effect
        assert isinstance(effect, RunPrefill), "only prompts share a launch"
        is_long = effect.stop - effect.start > settings.chunk
        if is_long and not chosen:
            return after, (launched,)
        effects.append(effect)
        if is_long or len(group_prefills(effects, settings.chunk)) > FORWARDS:
            break
        lane = after
        chosen.append(launched)
        rest.remove(next_prompt)
    return lane, tuple(chosen)


def count_missing_rows(requests: Mapping[RequestId, State], effect_request: EffectRequest) -> int:
    """Count the rows that are missing until the request can go on, or until one that follows it can."""
    state = requests.get(effect_request.request)
    if not isinstance(state, Prefilling | Restoring):
        return 0
    valid_rows = state.slot_lease.valid_rows
    ends = (*state.prompt.awaited_rows, state.prompt.prefill_rows)
    return min((at for at in ends if valid_rows < at), default=valid_rows) - valid_rows


def count_chunks(effect_request: EffectRequest, settings: Settings) -> int:
    """Count the forwards that an effect takes: one for each chunk of a prefill."""
    effect = effect_request.effect
    return -(-(effect.stop - effect.start) // settings.chunk) if isinstance(effect, RunPrefill) else 1


def shorten_prefill(effect_request: EffectRequest, row_limit: int) -> EffectRequest:
    """Limit a prefill to this many rows, because decode steps or other prompts wait. Other effects stay as they are."""
    effect = effect_request.effect
    if not isinstance(effect, RunPrefill) or effect.stop - effect.start <= row_limit:
        return effect_request
    shorter = evolve(effect, stop=effect.start + row_limit, checkpoint=False)
    return EffectRequest(effect_request.request, shorter)
