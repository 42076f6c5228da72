"""Followers: waiting requests that go on from rows of a prompt that is still being computed.

Problem. Several agents often begin at the same moment with the same long head: sub-agents of one client, or `n`
answers to one prompt. At that moment nothing of the head is computed yet, so every request would compute all of it.

Idea. A prompt that is being computed is already a prefix. A request whose prompt begins like one that is being computed
(its leader) keeps waiting in the queue until the leader has the common rows. Then it is admitted as if the leader's
slot had always held them: its slot shares the pages or copies the rows, and it computes its own tail only.

A request follows only if waiting is not much slower than computing the rows itself (`price_following`). Both use the
same device, one chunk at a time, so a request of its own could begin when the leader's chunk ends.

Invariants:

* The leader holds a slot and goes on whatever its followers do, so no cycle of waiting can arise.
* A follower keeps its place in the queue. A request behind it gets a slot only if one is left for the follower, so
  following never costs it a slot.
* A leader that is cancelled, fails, or loses its rows is no leader any more. Its followers are admitted in order of
  arrival: the first of them computes the head, and the others follow that one.
* A prompt that would be compressed neither leads nor follows, because other tokens are served. If a leader's prompt is
  compressed after all, it stops being a leader.

Where the model has positional state, the rows are of no use without the state behind them. The leader's prefill then
stops at the last whole block that both have (`Prompt.awaited_rows`), and the state is kept in a checkpoint on the
device. Three cases differ in what the lane has of that prefill (`find_state_rows`, `hold_at_awaited_rows`):

* It still waits for the lane. Then it is cut at that row.
* It runs, and has several chunks without decode steps. Then it is asked to end after the chunks that the device may
  have already, if that row comes behind them.
* It runs, and cannot end before that row. Then its request is no leader of this follower.

Example. Requests 1, 2 and 3 arrive together. Their prompts have 8,000 tokens in common and 1,000 tokens of their own.
Request 1 is admitted and computes 9,000 rows. Requests 2 and 3 wait until row 8,000 is there, and compute 1,000 rows
each: 11,000 rows instead of 27,000. Had they only 500 tokens in common, and the model positional state, then the first
chunk of request 1 would pass row 500 before request 2 is known. Request 2 would be admitted, and wait for the lane.
Request 3 would follow request 2, whose prefill would be cut at row 448, the end of a block of 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from attrs import evolve, frozen

from effects.all import EffectRequest
from effects.ids import RequestId
from effects.prefill import RunPrefill
from states import policy
from states.kept_rows import ResidentRows
from states.lane import Lane
from states.prompt_choice import shorten_prefill
from states.rates import Rates, estimate_prefill_time
from states.request_states import (
    LookingUp,
    Prefilling,
    Prompt,
    Restoring,
    State,
    UnloadingScorer,
    UnparkingDraft,
    Waiting,
)
from states.scope import find_state_row
from states.settings import DecisionContext, Settings
from states.slots import Follow, Slots, can_share_rows

# The states in which a request may lead: it has a slot, and its prompt's rows are not all there yet.
MayLead: TypeAlias = Prefilling | UnparkingDraft | UnloadingScorer | LookingUp | Restoring
# Of a prefill of several chunks, the executor launches each chunk before the one in front of it is reported. So the
# device may have this many chunks behind the last one that was reported.
CHUNKS_AHEAD = 2


@frozen
class Leader:
    """A request whose prompt is being computed, as a waiting request sees it."""

    request: RequestId
    valid_rows: int  # that it has now
    common_rows: int  # from which the waiting request could go on, once they are there


def choose_leader(
    slots: Slots,
    request: RequestId,
    own_rows: int,
    requests: Mapping[RequestId, State],
    context: DecisionContext,
    *,
    launched: Mapping[RequestId, RunPrefill],
) -> Follow | None:
    """Choose the request that a waiting one follows; None: it does not pay to wait, or there is no such request.

    Only the leader with the most common rows is priced; of equal ones, the one that has computed most. If following it
    does not pay, no other leader is considered.

    own_rows: rows of its prompt that the waiting request could go on from now. launched: the prefills that run.
    """
    state = requests[request]
    assert isinstance(state, Waiting), "only a waiting request follows"
    settings = context.settings
    prompt = state.prompt
    missing = prompt.prefill_rows - own_rows
    # Such a short rest runs on the main lane and need not queue for the prompt lane.
    is_narrow = missing <= settings.prompt_lane_min_rows
    if missing < settings.block_size or is_narrow:
        return None
    leaders = list[Leader]()
    for slot in slots.slots:
        if slot.holder is None or not can_share_rows(slot, requests, prompt.job):
            continue
        running = launched.get(slot.holder)
        leader = measure_leader(slot.holder, requests[slot.holder], prompt, own_rows, context, launched=running)
        if leader is None or leader.common_rows <= leader.valid_rows:
            continue
        if not is_shortened(prompt, leader.common_rows, context):
            leaders.append(leader)
    if not leaders:
        return None
    best = max(leaders, key=lambda leader: (leader.common_rows, leader.valid_rows))
    return price_following(best, own_rows, context)


def price_following(leader: Leader, own_rows: int, context: DecisionContext) -> Follow | None:
    """Compare waiting for the leader with computing the rows; None: computing them is quicker.

    The leader's rows come chunk by chunk. A request that computes them itself begins when the leader's chunk has ended.
    Waiting may take a quarter longer, because rows that are computed twice delay all requests on the device. Without
    measured times, rows are compared.
    """
    chunk = context.settings.chunk
    rates = context.rates
    chunks = -(-(leader.common_rows - leader.valid_rows) // chunk)
    waiting = estimate_cost(rates, leader.valid_rows, leader.valid_rows + chunks * chunk)
    computing = estimate_cost(rates, leader.valid_rows, leader.valid_rows + chunk)
    computing += estimate_cost(rates, own_rows, leader.common_rows)
    if 4 * waiting > 5 * computing:
        return None
    follow = Follow(leader.request, leader.common_rows)
    return evolve(follow, waiting_ns=waiting, computing_ns=computing) if any(rates.prefill) else follow


def estimate_cost(rates: Rates, start: int, stop: int) -> int:
    """Return the nanoseconds to compute rows `[start, stop)`, or the number of these rows if no time was measured."""
    return estimate_prefill_time(rates, start, stop) or max(0, stop - start)


def measure_leader(
    request: RequestId,
    state: State,
    prompt: Prompt,
    own_rows: int,
    context: DecisionContext,
    *,
    launched: RunPrefill | None,
) -> Leader | None:
    """Return the request as the leader of a prompt that has `own_rows` rows without it. launched: its running prefill.

    None: the leader will not have more of them, does not compute its prompt, or may yet shorten it.
    """
    if not isinstance(state, MayLead):
        return None
    settings = context.settings
    # Agents that have followed a head of 8,000 tokens are admitted at once, and computing stands still meanwhile. If
    # all of them compared whole prompts with each other here, that would take a third of the time.
    following = slice(own_rows, own_rows + settings.block_size)
    if state.prompt.tokens[following] != prompt.tokens[following]:
        return None
    valid_rows = state.slot_lease.valid_rows
    if isinstance(state, LookingUp | Restoring) and is_shortened(state.prompt, valid_rows, context):
        return None
    rows = ResidentRows(state.prompt.packed_tokens, state.prompt.prefill_rows).count_continuable(settings, prompt)
    if settings.stateful:
        rows = find_state_rows(state, rows, launched, settings)
    return Leader(request, valid_rows, rows) if rows > own_rows else None


def find_state_rows(state: MayLead, rows: int, launched: RunPrefill | None, settings: Settings) -> int:
    """Return `rows` if the leader can still keep its positional state after them; 0 if it cannot.

    A state is kept where a prefill ends. What runs cannot be shortened, but it can be ended between two chunks. If it
    ends at these rows anyway, it had to be launched with a checkpoint.

    launched: the leader's prefill that runs; None: it has none, or it waits for the lane.
    """
    if not settings.state_checkpoints:
        return 0
    begins = state.slot_lease.valid_rows
    if isinstance(state, Restoring):
        begins = state.stop
    elif launched is not None:
        if launched.device_checkpoint is not None and find_state_row(settings, launched.stop) == rows:
            return rows
        begins = find_soonest_end(launched, begins, settings)
    return rows if begins < rows else 0


def find_soonest_end(launched: RunPrefill, valid_rows: int, settings: Settings) -> int:
    """Return the row at which a running prefill can be made to end. valid_rows: what it has reported.

    Rows that go along with decode steps are too few to be worth an end of their launch. Without `mixed_launches` a
    prefill runs unattended on the prompt lane only, which models with positional state do not have.
    """
    if launched.forward_rows or not settings.mixed_launches:
        return launched.stop
    return min(launched.stop, valid_rows + CHUNKS_AHEAD * settings.chunk)


def list_launched_prefills(lanes: Iterable[Lane]) -> dict[RequestId, RunPrefill]:
    """Return the prefills that run, by request."""
    running = [effect_request for lane in lanes for effect_request in lane.running]
    return {
        effect_request.request: effect_request.effect
        for effect_request in running
        if isinstance(effect_request.effect, RunPrefill)
    }


def hold_at_awaited_rows(lane: Lane, follow: Follow, settings: Settings) -> tuple[Lane, bool]:
    """Make the leader's prefill end at the rows that a follower waits for, where the state behind them is needed.

    Returns whether the running launch has to end for it between two chunks (`StopLaunch`), and the lane.
    """
    if not settings.stateful:
        return lane, False

    def passes(effect_request: EffectRequest) -> bool:
        if effect_request.request != follow.leader or not isinstance(effect_request.effect, RunPrefill):
            return False
        return find_state_row(settings, effect_request.effect.stop) > follow.awaited_rows

    if any(map(passes, lane.running)):
        return evolve(lane, runs_unattended=False), lane.runs_unattended
    waiting = [
        cut_prefill(effect_request, follow.awaited_rows) if passes(effect_request) else effect_request
        for effect_request in lane.waiting
    ]
    return evolve(lane, waiting=tuple(waiting)), False


def cut_prefill(effect_request: EffectRequest, stop: int) -> EffectRequest:
    """Return a prefill that ends at this row, which lies within its rows."""
    effect = effect_request.effect
    assert isinstance(effect, RunPrefill), "only a prefill has rows"
    return shorten_prefill(effect_request, stop - effect.start)


def is_shortened(prompt: Prompt, rows: int, context: DecisionContext) -> bool:
    """Would the prompt be compressed if its first `rows` rows were there?"""
    return policy.decide_compression(context, prompt, prompt.prefill_rows - rows).go


def is_leading(follow: Follow, requests: Mapping[RequestId, State]) -> bool:
    """Is the leader still computing the rows that its follower waits for?"""
    state = requests.get(follow.leader)
    if not isinstance(state, MayLead):
        return False
    return state.slot_lease.valid_rows < follow.awaited_rows


def mark_ended_follows(slots: Slots, requests: Mapping[RequestId, State]) -> Slots:
    """Mark the follows whose leaders have the rows, or are leaders no longer. These requests may be admitted."""
    ended = {
        request: evolve(follow, ended=True)
        for request, follow in slots.follows.items()
        if not follow.ended and not is_leading(follow, requests)
    }
    return evolve(slots, follows={**slots.follows, **ended}) if ended else slots


def note_awaited_rows(state: State, rows: int) -> State:
    """Return the state of a leader that knows that a request waits for its first `rows` rows."""
    assert isinstance(state, MayLead), "such a state leads no follower"
    if rows in state.prompt.awaited_rows:
        return state
    return evolve(state, prompt=evolve(state.prompt, awaited_rows=(*state.prompt.awaited_rows, rows)))
