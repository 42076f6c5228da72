"""Growth of slots that share one pool of pages: how they get more while answers grow, and which requests wait.

`states/pages.py` explains why giving pages out in this way never blocks all requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from effects.all import EffectRequest
from effects.decode import RunDecode
from effects.ids import RequestId, SlotId
from states import pages
from states.lane import Lane, with_effect_requests
from states.pages import Pages
from states.request_states import State
from states.settings import Settings
from states.slot_admission import next_to_admit
from states.slots import Slots, forget_rows, list_evictable, list_running_jobs, replace_slot

# Pages that slots have ahead of their answers are at most one in this many of the pool.
AHEAD_PART = 16
# A step with at most this many rows left in its slot gets the next page as well, so that the steps behind it need not
# ask for it. A prompt of 1,024 tokens leaves its slot one row, and its second token came two forwards late.
LAST_ROWS = 8


def grow_for_decode_step(
    slots: Slots, effect_request: EffectRequest, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, EffectRequest | None]:
    """Give a decode step the pages that its rows take, from idle slots where need be. Other effects need none.

    A step takes one row for its token and one for each proposal. It gets further pages ahead (`count_pages_ahead`) if
    they are free. New pages are added to those of the slot, and named in `RunDecode.pages`, which tells the executor
    about them.

    Where there are no more pages, the step proposes only what its last page has room for. None: even the next token has
    no room, and the step has to wait. The request is then in `Slots.short_of_pages`. No pages are looked for again
    until that is emptied, when some page comes free.
    """
    effect = effect_request.effect
    if not isinstance(effect, RunDecode):
        return slots, effect_request
    page_rows = settings.page
    slot = slots.slots[effect.slot]
    held_rows = len(slot.pages) * page_rows
    needed = pages.count_pages(effect.position + 1 + effect.propose, page_rows)
    missing = max(0, needed - len(slot.pages))
    taken = None
    if effect_request.request not in slots.short_of_pages:
        if ahead := count_pages_ahead(slots, effect, needed, settings):
            taken = take_pages(slots, effect.slot, missing + ahead, requests, settings)
        if taken is None and missing:
            taken = take_pages(slots, effect.slot, missing, requests, settings)
    if taken is None and not missing:
        return slots, limit_to_rows(effect_request, effect, held_rows)
    if taken is not None:
        slots, new_pages = taken
        slots = replace_slot(slots, effect.slot, evolve(slots.slots[effect.slot], pages=(*slot.pages, *new_pages)))
        grown = evolve(effect, pages=(*effect.pages, *new_pages))
        return slots, limit_to_rows(effect_request, grown, held_rows + len(new_pages) * page_rows)
    slots = evolve(slots, short_of_pages=slots.short_of_pages | {effect_request.request})
    proposable = held_rows - effect.position - 1
    if proposable < 0:
        return slots, None
    return slots, limit_to_rows(effect_request, evolve(effect, propose=proposable), held_rows)


def count_pages_ahead(slots: Slots, effect: RunDecode, needed: int, settings: Settings) -> int:
    """Count the pages that a decode step is given for the tokens behind the next one. needed: its slot needs now.

    A request takes steps without asking the core as far as its slot has rows. Then it asks, and a GPU has launched a
    step or two without it by the time it goes on. So its slot gets pages for as many tokens as it may decode. All slots
    together have at most one page in AHEAD_PART of the pool in this way. No idle slot loses pages for that: none are
    given unless as many were free even if no two slots shared any.

    If the slot has at most LAST_ROWS left, it gets one page in any case, also from an idle slot: a few tokens later it
    would get that page all the same.
    """
    held = len(slots.slots[effect.slot].pages)
    stop = min(effect.position + effect.steps, settings.max_context)
    stop_pages = pages.count_pages(stop, settings.page)
    most = needed + settings.pages // (AHEAD_PART * settings.slots)
    ahead = min(stop_pages, most) - max(needed, held)
    spare = settings.pages - sum(len(slot.pages) for slot in slots.slots)
    if ahead > 0 and max(needed - held, 0) + ahead <= spare:
        return ahead
    return int(needed <= held < stop_pages and held * settings.page - effect.position <= LAST_ROWS)


def grow_waiting_steps(
    slots: Slots, lane: Lane, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, Lane, tuple[EffectRequest, ...]]:
    """Give waiting decode steps the pages that they need. Also returns those for which there are none now.

    Such a step is taken out of the lane. While there is one, the other steps take one token each and then ask again.
    """
    if not settings.pages:
        return slots, lane, ()
    ready = list[EffectRequest]()
    held = list[EffectRequest]()
    for effect_request in lane.waiting:
        slots, grown = grow_for_decode_step(slots, effect_request, requests, settings)
        if grown is None:
            held.append(effect_request)
        else:
            ready.append(grown)
    if held:
        # A step that waits for pages waits until another request ends, and a launch that continues alone would not
        # stop then. So the others take one step each.
        ready = [limit_steps(effect_request, 1) for effect_request in ready]
    return slots, with_effect_requests(lane, tuple(ready), lane.running), tuple(held)


def limit_to_rows(effect_request: EffectRequest, effect: RunDecode, rows: int) -> EffectRequest:
    """Return the request for this effect, which may continue alone only as far as its slot has rows.

    rows: of all pages of the slot. `RunDecode.steps` counts tokens where the executor may copy tokens by a rule, so
    copies stay within these rows too.
    """
    if effect is not effect_request.effect:
        effect_request = evolve(effect_request, effect=effect)
    return limit_steps(effect_request, rows - effect.position)


def limit_steps(effect_request: EffectRequest, most: int) -> EffectRequest:
    """Limit the steps that a decode step may take without asking the core."""
    effect = effect_request.effect
    if not isinstance(effect, RunDecode) or effect.steps <= max(1, most):
        return effect_request
    return evolve(effect_request, effect=evolve(effect, steps=max(1, most)))


def take_pages(
    slots: Slots, number: SlotId, count: int, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, Pages] | None:
    """Take this many more pages for a slot that is held. Idle slots lose theirs one after the other, as far as needed.

    None: there are too few, or some running request could not be sure to end any more.
    """
    jobs = list_running_jobs(slots, requests)
    claims = {holder: (slots.slots[holder].pages, pages.compute_claim(settings, job)) for holder, job in jobs.items()}
    held, claim = claims[number]
    for evicted in (None, *list_evictable(slots)):
        slots = slots if evicted is None else forget_rows(slots, evicted)
        new_pages = pages.find_free_pages([slot.pages for slot in slots.slots], settings.pages, count)
        if new_pages is not None:
            claims[number] = ((*held, *new_pages), claim)
            return (slots, new_pages) if pages.can_all_finish(list(claims.values()), settings.pages) else None
    return None


def mark_short_of_pages(slots: Slots, requests: Mapping[RequestId, State], settings: Settings) -> Slots:
    """Note that the next request could not be admitted for want of pages, if a slot is free for it.

    Pages are not looked for again before some come free.
    """
    free = [number for number, slot in enumerate(slots.slots) if slot.holder is None]
    request = next_to_admit(slots, free, requests, settings)
    return slots if request is None else evolve(slots, short_of_pages=slots.short_of_pages | {request})
