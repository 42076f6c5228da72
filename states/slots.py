"""Device slots: who holds one, who waits for one, and which sequences the idle ones still keep."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from effects.ids import RequestId, SlotId, Tokens
from effects.job import Job
from states.events import Admitted
from states.life import Held, Remains, State, Waiting, continued, remains, sequence, whole_blocks
from states.settings import Settings


@frozen
class Slot:
    tokens: Tokens = ()  # what its rows stand for, while nobody holds it
    holder: RequestId | None = None
    used: int = 0  # the turn of its last release
    salt: str = ""  # of whom they are from


@frozen
class Slots:
    slots: tuple[Slot, ...]
    waiting: tuple[RequestId, ...] = ()  # first come, first served
    turn: int = 0  # counts releases


def enqueue(slots: Slots, request: RequestId) -> Slots:
    return evolve(slots, waiting=(*slots.waiting, request))


def give_up(slots: Slots, request: RequestId, number: SlotId) -> Slots:
    """Its rows are gone: the slot is free, and the request is the next to be admitted."""
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    after = (*slots.slots[:number], Slot((), None, slot.used), *slots.slots[number + 1 :])
    return evolve(slots, slots=after, waiting=(request, *slots.waiting))


def forget(slots: Slots, number: SlotId) -> Slots:
    """Of a slot that nobody holds: its rows are gone."""
    slot = evolve(slots.slots[number], tokens=())
    return evolve(slots, slots=(*slots.slots[:number], slot, *slots.slots[number + 1 :]))


def leave_queue(slots: Slots, request: RequestId) -> Slots:
    if request not in slots.waiting:
        return slots
    return evolve(slots, waiting=tuple(other for other in slots.waiting if other != request))


def admit(
    slots: Slots, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, RequestId, Admitted] | None:
    """The next in the queue and the slot it gets: the longest shared prefix decides what can be kept."""
    free = [number for number, slot in enumerate(slots.slots) if slot.holder is None]
    if not free or not slots.waiting:
        return None
    request, *rest = slots.waiting
    state = requests[request]
    assert isinstance(state, Waiting)
    prompt = state.prompt.tokens
    rows = [
        resident(slot, requests, settings) if shares(slot, requests, state.prompt.job) else () for slot in slots.slots
    ]
    shared = [continued(settings, row, prompt) for row in rows]
    spare = [number for number in free if not loses(settings, rows[number], shared[number])]
    source = max(range(len(rows)), key=lambda number: (shared[number], number in spare, number in free, -number))
    keep = shared[source]
    target = source if keep and source in spare else oldest(slots, free, source if keep else None)
    taken = evolve(slots.slots[target], tokens=(), salt="", holder=request)
    after = (*slots.slots[:target], taken, *slots.slots[target + 1 :])
    admitted = Admitted(SlotId(target), SlotId(source if keep else target), keep)
    return evolve(slots, slots=after, waiting=tuple(rest)), request, admitted


def shares(slot: Slot, requests: Mapping[RequestId, State], job: Job) -> bool:
    """May the job go on from these rows, if they are the same? Where logprobs of a prompt were asked for, nobody does:
    its rows come about in other shapes than a prefill's.
    """
    if job.prompt_logprobs >= 0:
        return False
    holder = requests.get(slot.holder) if slot.holder is not None else None
    if not isinstance(holder, Held):
        return job.salt == slot.salt
    other = remains(holder).prompt.job
    return other.prompt_logprobs < 0 and job.salt == other.salt


def loses(settings: Settings, rows: Tokens, keep: int) -> bool:
    """Would continuing in place overwrite a tail that somebody could come back to?"""
    return whole_blocks(settings, len(rows)) > keep + settings.block_size


def oldest(slots: Slots, free: list[int], source: int | None) -> int:
    """The free slot whose sequence has gone unused longest; the source itself only if there is no other."""
    return min(free, key=lambda number: (number == source, slots.slots[number].used, number))


def resident(slot: Slot, requests: Mapping[RequestId, State], settings: Settings) -> Tokens:
    """The sequence whose rows are on the device in this slot, and may be continued or copied.

    A busy slot's positional state moves on, so there is nothing to be copied where the model has any.
    """
    if slot.holder is None:
        return slot.tokens
    state = requests.get(slot.holder)
    return sequence(settings, remains(state)) if isinstance(state, Held) and not settings.stateful else ()


def release(slots: Slots, request: RequestId, left: Remains, settings: Settings) -> Slots:
    """The request leaves; its slot keeps the sequence."""
    number = left.seat.slot
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    job = left.prompt.job
    kept = sequence(settings, left) if job.prompt_logprobs < 0 else ()
    idle = Slot(kept, None, slots.turn + 1, job.salt)
    after = (*slots.slots[:number], idle, *slots.slots[number + 1 :])
    return evolve(slots, slots=after, turn=slots.turn + 1)
