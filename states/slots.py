"""Device slots: which request holds each, which requests wait, and which sequences the idle slots still keep.

A slot is the memory on the device for the rows of one sequence. A request holds one slot from its admission to its end.
Afterwards the slot is idle and keeps the sequence, so that a later prompt that begins in the same way need not be
computed again. `states/slot_admission.py` decides who gets which slot; this module has the data and everything else
that changes it.

Invariants, asserted in `states/invariants.py`:

* A request holds one slot at most, and slots and requests agree about it.
* A checkpoint of positional state belongs to a row that its slot keeps.
* Where slots share a pool of pages (`states/pages.py`), an idle slot has exactly the pages of the rows that it keeps.

Where the model has positional state, a slot itself has the state behind the last row that it keeps. States behind a few
earlier rows are in checkpoints that all slots share (`states/checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from attrs import evolve, field, frozen

from effects.all import EffectRequest, Outcome
from effects.ids import CheckpointId, RequestId, SlotId, Tokens
from effects.job import Job, explain_no_compression, freezes_messages
from effects.packed_tokens import pack_tokens
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from states import pages, scope
from states.checkpoints import EMPTY, StateCheckpoint, choose_checkpoint, drop_beyond, replace_checkpoint
from states.kept_rows import NO_ROWS, ResidentRows, find_own_state, get_kept_rows, get_kept_sequence
from states.lane import Lane
from states.pages import Pages
from states.request_states import (
    Draining,
    Prefilling,
    ReleasingState,
    RequestRemainder,
    State,
    StateWithSlot,
    get_remainder,
)
from states.settings import Settings

# Releases of any slot. A conversation that was not continued for this many of them no longer keeps its slot.
CONVERSATION_PATIENCE = 64


@frozen
class Slot:
    """One slot of the device, and the sequence whose rows it keeps."""

    tokens: Tokens = ()  # that its rows stand for, while it is idle
    holder: RequestId | None = None  # the request that it is given to; None: it is idle
    last_release: int = 0  # the turn of its last release
    salt: str = ""  # of the job that its rows are from, while it is idle
    state_position: int = 0  # rows before its own positional state, while it is idle; 0: it has no usable state
    one_off: bool = False  # its holder, or the request that left its rows, is one that no other request continues
    is_brief: bool = False  # its holder is a one-off whose answer is short
    pages: Pages = ()  # where its rows are, if slots share a pool of pages

    @cached_property
    def packed_tokens(self) -> bytes:
        """The tokens as bytes (`effects.packed_tokens`)."""
        return pack_tokens(self.tokens)


@frozen
class Follow:
    """A waiting request goes on from rows that another request is computing (`states/followers.py`)."""

    leader: RequestId
    awaited_rows: int  # of its prompt that the waiting request goes on from
    waiting_ns: int = 0  # as in `Followed`
    computing_ns: int = 0
    ended: bool = False  # the leader has the rows, or is a leader no longer


@frozen
class Slots:
    """All slots of the device, the queue for them, and the checkpoints that they share."""

    slots: tuple[Slot, ...]
    waiting: tuple[RequestId, ...] = ()  # for a slot, in order of arrival
    release_count: int = 0  # counts releases
    checkpoints: tuple[StateCheckpoint, ...] = ()
    # Requests for which there were too few pages when last looked for.
    short_of_pages: frozenset[RequestId] = frozenset()
    follows: Mapping[RequestId, Follow] = field(factory=dict[RequestId, Follow])  # by waiting request


def replace_slot(slots: Slots, number: int, slot: Slot) -> Slots:
    """Return the slots with another one at this number."""
    return evolve(slots, slots=(*slots.slots[:number], slot, *slots.slots[number + 1 :]))


# --- the queue ---


def enqueue(slots: Slots, request: RequestId) -> Slots:
    """Append a request to the queue for a slot."""
    return evolve(slots, waiting=(*slots.waiting, request))


def leave_queue(slots: Slots, request: RequestId) -> Slots:
    """Remove a request from the queue, if it is there, with what it follows and its want of pages."""
    if request not in slots.waiting:
        return slots
    stay = tuple(other for other in slots.waiting if other != request)
    follows = slots.follows
    if request in follows:
        follows = {follower: follow for follower, follow in follows.items() if follower != request}
    return evolve(slots, waiting=stay, short_of_pages=slots.short_of_pages - {request}, follows=follows)


def requeue_holder(slots: Slots, request: RequestId, number: SlotId) -> Slots:
    """Free a slot whose rows are lost, and put the request that held it at the head of the queue."""
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    slots = replace_slot(forget_rows(slots, number), number, Slot((), None, slot.last_release))
    return evolve(slots, waiting=(request, *slots.waiting), short_of_pages=frozenset())


def count_openings(slots: Slots, requests: Mapping[RequestId, State], settings: Settings) -> int:
    """Count the waiting requests that may get a slot now: free slots, and no more than may be served at once."""
    holders = [slot.holder for slot in slots.slots if slot.holder is not None]
    free_count = len(slots.slots) - len(holders)
    if not settings.spare_slots:
        return free_count
    served_count = sum(not isinstance(requests.get(holder), ReleasingState) for holder in holders)
    return min(free_count, settings.serving_slots - served_count)


def hurries_snapshots(slots: Slots, settings: Settings) -> bool:
    """Do requests wait for a slot or for pages, or are half of the spare slots taken?

    Then what is being saved holds requests up, or soon will.
    """
    if slots.waiting or slots.short_of_pages:
        return True
    if not settings.spare_slots:
        return False
    return sum(slot.holder is None for slot in slots.slots) <= settings.spare_slots // 2


# --- rows ---


def forget_rows(slots: Slots, number: int) -> Slots:
    """Forget the rows of a slot and every checkpoint of them.

    A slot that is held keeps its pages: effects that are in flight may still write there.
    """
    slot = slots.slots[number]
    slot = evolve(slot, tokens=(), state_position=0, pages=() if slot.holder is None else slot.pages)
    checkpoints = drop_beyond(slots.checkpoints, SlotId(number), 0)
    return evolve(replace_slot(slots, number, slot), checkpoints=checkpoints)


def get_resident_tokens(slot: Slot, requests: Mapping[RequestId, State], settings: Settings) -> Tokens:
    """Return the tokens whose rows are in this slot, and which another request may continue or copy.

    While a request holds the slot, the slot's own positional state moves on with it. Other requests can then continue
    only from checkpoints of the slot.
    """
    if slot.holder is None:
        return slot.tokens
    state = requests.get(slot.holder)
    return get_kept_sequence(settings, get_remainder(state)) if isinstance(state, StateWithSlot) else ()


def get_resident_rows(slot: Slot, requests: Mapping[RequestId, State], settings: Settings) -> ResidentRows:
    """Return the rows of this slot that another request may continue or copy (`get_resident_tokens`)."""
    if slot.holder is None:
        return ResidentRows(slot.packed_tokens, len(slot.tokens))
    state = requests.get(slot.holder)
    return get_kept_rows(settings, get_remainder(state)) if isinstance(state, StateWithSlot) else NO_ROWS


def find_row_salt(slot: Slot, requests: Mapping[RequestId, State]) -> str | None:
    """Return the salt of the slot's rows; None: no request may continue from them."""
    holder = requests.get(slot.holder) if slot.holder is not None else None
    if not isinstance(holder, StateWithSlot):
        return slot.salt
    job = get_remainder(holder).prompt.job
    return job.salt if job.prompt_logprobs < 0 else None


def can_share_rows(slot: Slot, requests: Mapping[RequestId, State], job: Job) -> bool:
    """May the job go on from the slot's rows, if they stand for the same tokens?

    A job that asks for logprobs of its prompt never does: its rows are computed in other shapes than a prefill's.
    """
    return job.prompt_logprobs < 0 and find_row_salt(slot, requests) == job.salt


def keeps_conversation(slots: Slots, number: int) -> bool:
    """Does an idle slot keep a conversation that is likely to be continued?"""
    slot = slots.slots[number]
    return bool(slot.tokens) and not slot.one_off and slots.release_count - slot.last_release < CONVERSATION_PATIENCE


def list_evictable(slots: Slots) -> list[int]:
    """List the idle slots that have pages, in the order in which they lose them.

    Slots without a conversation come first, and among equals those that have gone unused longest.
    """
    idle = [number for number, slot in enumerate(slots.slots) if slot.holder is None and slot.pages]
    return sorted(idle, key=lambda number: (keeps_conversation(slots, number), slots.slots[number].last_release))


def list_running_jobs(slots: Slots, requests: Mapping[RequestId, State]) -> dict[int, Job]:
    """Return the job of each slot that is held."""
    states = {number: requests[slot.holder] for number, slot in enumerate(slots.slots) if slot.holder is not None}
    return {
        number: get_remainder(state).prompt.job for number, state in states.items() if isinstance(state, StateWithSlot)
    }


def is_served_verbatim(job: Job, settings: Settings) -> bool:
    """Is it certain that the job's prompt is never shortened?"""
    if not settings.scorer_max_tokens:
        return True
    return bool(explain_no_compression(job, settings.scorer_max_tokens)) and not freezes_messages(job)


# --- a request that opens, fills and leaves its slot ---


def complete_open_slot(slots: Slots, opening: OpenSlot) -> tuple[Slots, OpenSlot]:
    """Add the slot's pages to the effect, and drop checkpoints of rows that the new prompt does not share."""
    left = evolve(slots, checkpoints=drop_beyond(slots.checkpoints, opening.slot, opening.keep))
    return left, evolve(opening, pages=slots.slots[opening.slot].pages)


def assign_checkpoint(
    slots: Slots,
    effect_request: EffectRequest,
    requests: Mapping[RequestId, State],
    settings: Settings,
    taken: frozenset[CheckpointId] = frozenset(),
) -> tuple[Slots, EffectRequest]:
    """Choose the checkpoint that keeps the positional state after a chunk which is about to be launched.

    taken: checkpoints of chunks that run. The checkpoint is empty until the chunk is computed. No checkpoint is
    assigned in three cases:

    * the state after this chunk is not to be kept (`scope.find_next_mark`);
    * all checkpoints of the device are worth more;
    * one of them has this state already, because its rows are computed a second time.
    """
    effect = effect_request.effect
    state = requests[effect_request.request]
    assert isinstance(effect, RunPrefill), effect_request
    mark = scope.find_next_mark(settings, state.slot_lease, state.prompt) if isinstance(state, Prefilling) else None
    if mark is None or mark.at != scope.find_state_row(settings, effect.stop):
        return slots, effect_request
    if any((checkpoint.slot, checkpoint.at) == (effect.slot, mark.at) for checkpoint in slots.checkpoints):
        return slots, effect_request
    number = choose_checkpoint(slots.checkpoints, effect.slot, mark.at, slots.release_count, taken)
    if number is None:
        return slots, effect_request
    emptied = replace_checkpoint(slots.checkpoints, number, EMPTY)
    return evolve(slots, checkpoints=emptied), evolve(effect_request, effect=evolve(effect, device_checkpoint=number))


def assign_checkpoints(
    slots: Slots,
    lane: Lane,
    launched: tuple[EffectRequest, ...],
    requests: Mapping[RequestId, State],
    settings: Settings,
) -> tuple[Slots, Lane, tuple[EffectRequest, ...]]:
    """Choose where the states after the rows of prompts are kept. They come last in what is launched.

    Returns the lane and what is launched with these places. lane: these effects are in its launch already.
    """
    if not (settings.state_checkpoints and launched and isinstance(launched[-1].effect, RunPrefill)):
        return slots, lane, launched
    chosen = dict[RequestId, EffectRequest]()
    taken = frozenset(find_kept_places(lane.running))
    for effect_request in launched:
        if isinstance(effect_request.effect, RunPrefill):
            slots, chosen[effect_request.request] = assign_checkpoint(slots, effect_request, requests, settings, taken)
            taken = taken.union(find_kept_places([chosen[effect_request.request]]))
    running = tuple(chosen.get(effect_request.request, effect_request) for effect_request in lane.running)
    return (
        slots,
        evolve(lane, running=running),
        tuple(chosen.get(effect_request.request, effect_request) for effect_request in launched),
    )


def find_kept_places(effect_requests: Iterable[EffectRequest]) -> Iterator[CheckpointId]:
    """Yield the checkpoints that keep the states after prefills among these effects."""
    for effect_request in effect_requests:
        if isinstance(effect_request.effect, RunPrefill) and effect_request.effect.device_checkpoint is not None:
            yield effect_request.effect.device_checkpoint


def record_checkpoint(
    slots: Slots,
    effect_request: EffectRequest,
    outcome: Outcome,
    requests: Mapping[RequestId, State],
    settings: Settings,
) -> Slots:
    """Note that a checkpoint has the state after the rows of a chunk, once they are computed.

    It has not if the chunk was given up before its end, or if the slot's rows were lost meanwhile.
    """
    effect = effect_request.effect
    state = requests.get(effect_request.request)
    if not (
        isinstance(effect, RunPrefill) and effect.device_checkpoint is not None and isinstance(outcome, PrefillAdvanced)
    ):
        return slots
    if outcome.stop != effect.stop:
        return slots
    if not (isinstance(state, Prefilling) or (isinstance(state, Draining) and not state.rows_lost)):
        return slots
    checkpoint = StateCheckpoint(effect.slot, scope.find_state_row(settings, outcome.stop), slots.release_count)
    return evolve(slots, checkpoints=replace_checkpoint(slots.checkpoints, effect.device_checkpoint, checkpoint))


def release_slot(slots: Slots, request: RequestId, left: RequestRemainder, settings: Settings) -> Slots:
    """Make the slot of a request that ends idle. The slot keeps the request's sequence.

    Rows of a prompt whose logprobs were asked for are not kept: they were computed in other shapes than a prefill's.
    """
    number = left.slot_lease.slot
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    job = left.prompt.job
    kept: Tokens = ()
    state_position = 0
    if job.prompt_logprobs < 0:
        kept = get_kept_sequence(settings, left)
        state_position = find_own_state(settings, left)
    held = slot.pages[: pages.count_pages(len(kept), settings.page)]
    idle = Slot(kept, None, slots.release_count + 1, job.salt, state_position, slot.one_off, pages=held)
    checkpoints = drop_beyond(slots.checkpoints, number, len(kept))
    return evolve(
        replace_slot(slots, number, idle),
        release_count=slots.release_count + 1,
        checkpoints=checkpoints,
        short_of_pages=frozenset(),
    )
