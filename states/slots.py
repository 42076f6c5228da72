"""Device slots: who holds one, who waits for one, and which sequences the idle ones still keep.

Where the model has positional state, a slot's own is the one at the end of what it keeps, and a few earlier ones are
kept in places that all slots share (`places.py`).

A conversation that goes on is not pushed off its slot by requests that nobody goes on from (`policy.one_off`): those
take the slots of one another, wait for one if they have to, and what they leave behind makes room first.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from effects.all import Ask, Outcome
from effects.ids import PlaceId, RequestId, SlotId, Tokens
from effects.job import Job
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from states import places, policy, scope
from states.events import Admitted
from states.life import (
    Draining,
    Held,
    Prefilling,
    Remains,
    State,
    Waiting,
    live,
    remains,
    sequence,
)
from states.places import Place
from states.sequences import continued, whole_blocks
from states.settings import Settings

PATIENCE = 64  # releases: where nobody came back to a conversation for so long, its slot is anybody's
BRIEF = 1024  # tokens of an answer that a one-off waits for at most: a title or a summary takes fewer


@frozen
class Slot:
    tokens: Tokens = ()  # what its rows stand for, while nobody holds it
    holder: RequestId | None = None
    used: int = 0  # the turn of its last release
    salt: str = ""  # of whom they are from
    live: int = 0  # where its own positional state is, while nobody holds it; 0: nowhere that could be gone on from
    one_off: bool = False  # its holder, or who left the tokens, is nobody to go on from
    brief: bool = False  # and its holder's answer is short


@frozen
class Slots:
    slots: tuple[Slot, ...]
    waiting: tuple[RequestId, ...] = ()  # first come, first served
    turn: int = 0  # counts releases
    places: tuple[Place, ...] = ()


def enqueue(slots: Slots, request: RequestId) -> Slots:
    return evolve(slots, waiting=(*slots.waiting, request))


def give_up(slots: Slots, request: RequestId, number: SlotId) -> Slots:
    """Its rows are gone: the slot is free, and the request is the next to be admitted."""
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    slots = forget(slots, number)
    after = (*slots.slots[:number], Slot((), None, slot.used), *slots.slots[number + 1 :])
    return evolve(slots, slots=after, waiting=(request, *slots.waiting))


def forget(slots: Slots, number: SlotId) -> Slots:
    """Its rows are gone, and so is every checkpoint of them."""
    slot = evolve(slots.slots[number], tokens=(), live=0)
    after = (*slots.slots[:number], slot, *slots.slots[number + 1 :])
    return evolve(slots, slots=after, places=places.cut(slots.places, number, 0))


def leave_queue(slots: Slots, request: RequestId) -> Slots:
    if request not in slots.waiting:
        return slots
    return evolve(slots, waiting=tuple(other for other in slots.waiting if other != request))


def admit(
    slots: Slots, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, RequestId, Admitted] | None:
    """The next in the queue and the slot it gets: the longest shared prefix decides what can be kept."""
    if not slots.waiting:
        return None
    free = [number for number, slot in enumerate(slots.slots) if slot.holder is None]
    request = following(slots, free, requests, settings)
    if request is None:
        return None
    state, alone = requests[request], one_off(requests[request])
    assert isinstance(state, Waiting)
    prompt = state.prompt.tokens
    rows = [
        resident(slot, requests, settings) if shares(slot, requests, state.prompt.job) else () for slot in slots.slots
    ]
    shared = [continued(settings, row, prompt) for row in rows]
    starts = [start(slots, shared, number, settings) for number in range(len(rows))]
    spare = [
        number
        for number in free
        if not loses(settings, rows[number], shared[number]) and not (alone and awaited(slots, number))
    ]
    source = max(
        range(len(rows)),
        key=lambda number: (starts[number][0], shared[number], number in spare, number in free, -number),
    )
    (at, place), keep = starts[source], shared[source] if settings.store else starts[source][0]
    target = source if keep and source in spare else oldest(slots, free, source if keep else None)
    brief = alone and state.prompt.job.max_tokens <= BRIEF
    taken = evolve(slots.slots[target], tokens=(), salt="", holder=request, live=0, one_off=alone, brief=brief)
    after = (*slots.slots[:target], taken, *slots.slots[target + 1 :])
    left = places.used(slots.places, place, slots.turn)
    left = places.handed_on(left, target, shared[target], heirs(slots, target, requests, settings))
    admitted = Admitted(SlotId(target), SlotId(source if keep else target), keep, at if settings.stateful else 0, place)
    return evolve(leave_queue(slots, request), slots=after, places=left), request, admitted


def following(
    slots: Slots, free: list[int], requests: Mapping[RequestId, State], settings: Settings
) -> RequestId | None:
    """Who is next to be admitted: first come, first served. But where every free slot keeps a conversation, a one-off
    waits for the slot of another that is being answered in a few words, and lets others pass, as long as the queue has
    room: a chat's first turn may be taken for one, and must not wait for another chat's long answer.
    """
    if not free:
        return None
    another = any(slot.brief for slot in slots.slots)
    spared = another and len(slots.waiting) < settings.max_queue and all(awaited(slots, number) for number in free)
    return next((request for request in slots.waiting if not (spared and one_off(requests[request]))), None)


def one_off(state: State) -> bool:
    return isinstance(state, Waiting) and policy.one_off(state.prompt.job).go


def awaited(slots: Slots, number: int) -> bool:
    """Does it keep a conversation that somebody may come back to?"""
    slot = slots.slots[number]
    return bool(slot.tokens) and not slot.one_off and slots.turn - slot.used < PATIENCE


def start(slots: Slots, shared: list[int], source: int, settings: Settings) -> tuple[int, PlaceId | None]:
    """Where a prompt goes on from if its rows are those of `source`, and who has the positional state, if not that."""
    if not settings.stateful:
        return shared[source], None
    own = slots.slots[source].live
    found: tuple[int, PlaceId | None] = (own if own <= shared[source] else 0, None)
    for number, place in enumerate(slots.places):
        if place.slot is not None and found[0] < place.at <= min(shared[source], shared[place.slot]):
            found = place.at, PlaceId(number)
    return found


def shares(slot: Slot, requests: Mapping[RequestId, State], job: Job) -> bool:
    """May the job go on from these rows, if they are the same? Where logprobs of a prompt were asked for, nobody does:
    its rows come about in other shapes than a prefill's.
    """
    return job.prompt_logprobs < 0 and whose(slot, requests) == job.salt


def whose(slot: Slot, requests: Mapping[RequestId, State]) -> str | None:
    """The salt of its rows; None if nobody may go on from them."""
    holder = requests.get(slot.holder) if slot.holder is not None else None
    if not isinstance(holder, Held):
        return slot.salt
    job = remains(holder).prompt.job
    return job.salt if job.prompt_logprobs < 0 else None


def heirs(slots: Slots, target: int, requests: Mapping[RequestId, State], settings: Settings) -> list[Tokens]:
    """The sequences of the slots that may take places of the target over: of its own salt, whoever it is for now."""
    salt = whose(slots.slots[target], requests)
    return [resident(slot, requests, settings) if whose(slot, requests) == salt else () for slot in slots.slots]


def loses(settings: Settings, rows: Tokens, keep: int) -> bool:
    """Would continuing in place overwrite a tail that somebody could come back to?"""
    return whole_blocks(settings, len(rows)) > keep + settings.block_size


def oldest(slots: Slots, free: list[int], source: int | None) -> int:
    """The free slot whose sequence has gone unused longest, of those that keep no conversation if there is one; the
    source itself only if there is no other.
    """
    return min(free, key=lambda number: (awaited(slots, number), number == source, slots.slots[number].used, number))


def resident(slot: Slot, requests: Mapping[RequestId, State], settings: Settings) -> Tokens:
    """The sequence whose rows are on the device in this slot, and may be continued or copied.

    A busy slot's own positional state moves on, so only those in places can be gone on from.
    """
    if slot.holder is None:
        return slot.tokens
    state = requests.get(slot.holder)
    return sequence(settings, remains(state)) if isinstance(state, Held) else ()


def release(slots: Slots, request: RequestId, left: Remains, settings: Settings) -> Slots:
    """The request leaves; its slot keeps the sequence."""
    number = left.seat.slot
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    job = left.prompt.job
    kept, at = (sequence(settings, left), live(settings, left)) if job.prompt_logprobs < 0 else ((), 0)
    idle = Slot(kept, None, slots.turn + 1, job.salt, at, slot.one_off)
    after = (*slots.slots[:number], idle, *slots.slots[number + 1 :])
    return evolve(slots, slots=after, turn=slots.turn + 1, places=places.cut(slots.places, number, len(idle.tokens)))


def opened(slots: Slots, opening: OpenSlot) -> Slots:
    """The slot may serve another prompt from now on, which shares so many rows with the one before."""
    return evolve(slots, places=places.cut(slots.places, opening.slot, opening.keep))


def given(
    slots: Slots, ask: Ask, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, tuple[Ask, ...]]:
    """A chunk is about to be launched: if it stops where the positional state is kept, there is a place for that, which
    stays empty until it has happened; unless all that is kept is worth more, or a place has that state already: rows
    are computed again where another prompt is served than before.
    """
    effect, state = ask.effect, requests[ask.request]
    assert isinstance(effect, RunPrefill), ask
    mark = scope.mark(settings, state.seat, state.prompt) if isinstance(state, Prefilling) else None
    if mark is None or mark.at != effect.stop:
        return slots, (ask,)
    if any((place.slot, place.at) == (effect.slot, mark.at) for place in slots.places):
        return slots, (ask,)
    place = places.room(slots.places, effect.slot, mark.at, slots.turn)
    if place is None:
        return slots, (ask,)
    emptied = places.changed(slots.places, place, places.EMPTY)
    return evolve(slots, places=emptied), (evolve(ask, effect=evolve(effect, place=place)),)


def acknowledged(slots: Slots, ask: Ask, outcome: Outcome, requests: Mapping[RequestId, State]) -> Slots:
    """Rows were computed, and their place has the state behind them; unless the slot's rows were lost meanwhile, or
    they were given up before their end.
    """
    effect, state = ask.effect, requests.get(ask.request)
    if not (isinstance(effect, RunPrefill) and effect.place is not None and isinstance(outcome, PrefillAdvanced)):
        return slots
    if outcome.stop != effect.stop:
        return slots
    if not (isinstance(state, Prefilling) or (isinstance(state, Draining) and not state.lost)):
        return slots
    place = Place(effect.slot, outcome.stop, slots.turn)
    return evolve(slots, places=places.changed(slots.places, effect.place, place))
