"""Device slots: who holds one, who waits for one, and which sequences the idle ones still keep.

Where the model has positional state, a slot's own is the one at the end of what it keeps, and a few earlier ones are
kept in places that all slots share (`places.py`).

A conversation that goes on is not pushed off its slot by requests that nobody goes on from (`policy.one_off`): those
take the slots of one another, wait for one if they have to, and what they leave behind makes room first.

Where rows are in pages that all slots share (`pages.py`), a slot is given with as many as the prompt takes, and idle
slots lose theirs for it, in the same order. What is worth keeping of these sequences was kept beyond the device when
their requests ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import evolve, frozen

from effects.all import EffectRequest, Outcome
from effects.ids import PlaceId, RequestId, SlotId, Tokens
from effects.job import Job, freezes, uncompressed
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from states import checkpoints as places
from states import pages, policy, scope
from states.checkpoints import StateCheckpoint
from states.events import Admitted
from states.pages import Pages
from states.request_states import Draining, Held, Prefilling, RequestRemainder, State, Waiting, live, remains, sequence
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
    pages: Pages = ()  # where its rows are, if slots share what there is


@frozen
class Slots:
    slots: tuple[Slot, ...]
    waiting: tuple[RequestId, ...] = ()  # first come, first served
    turn: int = 0  # counts releases
    places: tuple[StateCheckpoint, ...] = ()
    short: frozenset[RequestId] = frozenset()  # there were too few pages for them when they were last looked for


def enqueue(slots: Slots, request: RequestId) -> Slots:
    return evolve(slots, waiting=(*slots.waiting, request))


def give_up(slots: Slots, request: RequestId, number: SlotId) -> Slots:
    """Its rows are gone: the slot is free, and the request is the next to be admitted."""
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    slots = forget(slots, number)
    after = (*slots.slots[:number], Slot((), None, slot.used), *slots.slots[number + 1 :])
    return evolve(slots, slots=after, waiting=(request, *slots.waiting), short=frozenset())


def forget(slots: Slots, number: int) -> Slots:
    """Its rows are gone, and so is every checkpoint of them. Who holds it may write its pages until it is given up."""
    slot = slots.slots[number]
    slot = evolve(slot, tokens=(), live=0, pages=() if slot.holder is None else slot.pages)
    after = (*slots.slots[:number], slot, *slots.slots[number + 1 :])
    return evolve(slots, slots=after, places=places.cut(slots.places, SlotId(number), 0))


def leave_queue(slots: Slots, request: RequestId) -> Slots:
    if request not in slots.waiting:
        return slots
    stay = tuple(other for other in slots.waiting if other != request)
    return evolve(slots, waiting=stay, short=slots.short - {request})


def admit(
    slots: Slots, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, RequestId, Admitted] | None:
    """The next in the queue and the slot it gets: the longest shared prefix decides what can be kept."""
    if not slots.waiting:
        return None
    free = [number for number, slot in enumerate(slots.slots) if slot.holder is None]
    request = following(slots, free, requests, settings)
    if request is None or request in slots.short:
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
    held: Pages = ()
    if settings.pages:
        last = None if place is None else slots.places[place].slot
        seated = paged(slots, state.prompt.job, (target, source if keep else target, keep, last), requests, settings)
        if seated is None:
            return None
        slots, (target, source, keep, _), held = seated
        at, place = (at, place) if keep else (0, None)
    brief = alone and state.prompt.job.max_tokens <= BRIEF
    taken = Slot((), request, slots.slots[target].used, "", 0, alone, brief, held)
    after = (*slots.slots[:target], taken, *slots.slots[target + 1 :])
    left = places.used(slots.places, place, slots.turn)
    if left:
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


Seating: TypeAlias = tuple[int, int, int, SlotId | None]  # target, source, rows to keep, who else has to stay for them


def paged(
    slots: Slots, job: Job, wanted: Seating, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, Seating, Pages] | None:
    """Pages for the prompt, where need be from idle slots; None: not before somebody ends. The seating that is wanted,
    or else in the place of the source, whose tail is lost; or, where nobody runs who could end, with nothing kept.
    """
    target, source, keep, last = wanted
    tried = [wanted]
    if slots.slots[source].holder is None and source != target:
        tried.append((source, source, keep, last))
    if all(slot.holder is None for slot in slots.slots):
        tried.append((target, target, 0, None))
    for seating in tried:
        stay = {*seating[:2], seating[3]}
        left = slots
        for number in (None, *(one for one in evictable(slots) if one not in stay)):
            left = left if number is None else forget(left, number)
            if (held := table(left, job, seating, requests, settings)) is not None:
                return left, seating, held
    return None


def evictable(slots: Slots) -> list[int]:
    """Idle slots that have pages, in the order in which they lose them: as slots themselves are taken."""
    idle = [number for number, slot in enumerate(slots.slots) if slot.holder is None and slot.pages]
    return sorted(idle, key=lambda number: (awaited(slots, number), slots.slots[number].used))


def table(
    slots: Slots, job: Job, seating: Seating, requests: Mapping[RequestId, State], settings: Settings
) -> Pages | None:
    """Of the target: what it keeps of the source's, and new ones for the rest of the prompt; None: there are too few.

    A prompt that may yet be compressed shares none, since its rows may become others.
    """
    target, source, keep, _ = seating
    others = [slot.pages for number, slot in enumerate(slots.slots) if number != target]
    given, jobs = slots.slots[source], running(slots, requests)
    lasting = all(verbatim(one, settings) for one in (job, jobs.get(source, job)))
    elsewhere = {one for held in others for one in held}
    begin = pages.kept(given.pages, keep, settings.page, elsewhere, shared=settings.shares_pages and lasting)
    count = pages.needed(min(len(job.prompt), settings.max_context), settings.page)
    whole = (*begin, *[None] * (count - len(begin)))
    stay = tuple(one for one in begin if one is not None)
    fresh = pages.free((*others, stay), settings.pages, whole.count(None))
    if fresh is None:
        return None
    new = iter(fresh)
    held = tuple(next(new) if one is None else one for one in whole)
    claims = [(slots.slots[number].pages, pages.claim(settings, one)) for number, one in jobs.items()]
    return held if pages.safe([*claims, (held, pages.claim(settings, job))], settings.pages) else None


def verbatim(job: Job, settings: Settings) -> bool:
    """Is its prompt served as it came, whatever happens?"""
    return not settings.drafter or (bool(uncompressed(job, settings.drafter)) and not freezes(job))


def running(slots: Slots, requests: Mapping[RequestId, State]) -> dict[int, Job]:
    """By slot, the jobs of those who hold one."""
    held = [(number, requests[slot.holder]) for number, slot in enumerate(slots.slots) if slot.holder is not None]
    return {number: remains(state).prompt.job for number, state in held if isinstance(state, Held)}


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


def release(slots: Slots, request: RequestId, left: RequestRemainder, settings: Settings) -> Slots:
    """The request leaves; its slot keeps the sequence."""
    number = left.seat.slot
    slot = slots.slots[number]
    assert slot.holder == request, (slot, request)
    job = left.prompt.job
    kept, at = (sequence(settings, left), live(settings, left)) if job.prompt_logprobs < 0 else ((), 0)
    held = slot.pages[: pages.needed(len(kept), settings.page)]
    idle = Slot(kept, None, slots.turn + 1, job.salt, at, slot.one_off, pages=held)
    after = (*slots.slots[:number], idle, *slots.slots[number + 1 :])
    cut = places.cut(slots.places, number, len(idle.tokens))
    return evolve(slots, slots=after, turn=slots.turn + 1, places=cut, short=frozenset())


def opened(slots: Slots, opening: OpenSlot) -> tuple[Slots, OpenSlot]:
    """The slot may serve another prompt from now on, which shares so many rows with the one before."""
    left = evolve(slots, places=places.cut(slots.places, opening.slot, opening.keep))
    return left, evolve(opening, pages=slots.slots[opening.slot].pages)


def given(
    slots: Slots, ask: EffectRequest, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, tuple[EffectRequest, ...]]:
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


def acknowledged(slots: Slots, ask: EffectRequest, outcome: Outcome, requests: Mapping[RequestId, State]) -> Slots:
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
    place = StateCheckpoint(effect.slot, outcome.stop, slots.turn)
    return evolve(slots, places=places.changed(slots.places, effect.place, place))
