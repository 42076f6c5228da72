"""How the slots that share one pool of pages come to more of them while answers grow, and who has to wait for that."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from effects.all import EffectRequest
from effects.decode import RunDecode
from effects.ids import RequestId, SlotId
from states import pages
from states.pages import Pages
from states.request_states import State
from states.settings import Settings
from states.slots import Slots, evictable, following, forget, running


def grown(
    slots: Slots, ask: EffectRequest, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, EffectRequest | None]:
    """A decode step with the pages that its rows take, from idle slots where need be. Where there are none to be had,
    it proposes as little as its last page has room for; None: not even the token fits, and it has to wait.
    """
    effect, page = ask.effect, settings.page
    if not isinstance(effect, RunDecode):
        return slots, ask
    held = slots.slots[effect.slot].pages
    missing = pages.needed(effect.position + 1 + effect.propose, page) - len(held)
    if missing <= 0:
        return slots, within(ask, effect, len(held) * page)
    more = None if ask.request in slots.short else spared(slots, effect.slot, missing, requests, settings)
    if more is not None:
        slots, new = more
        slot = evolve(slots.slots[effect.slot], pages=(*held, *new))
        after = (*slots.slots[: effect.slot], slot, *slots.slots[effect.slot + 1 :])
        grown = evolve(effect, pages=(*effect.pages, *new))
        return evolve(slots, slots=after), within(ask, grown, len(slot.pages) * page)
    slots = evolve(slots, short=slots.short | {ask.request})
    room = len(held) * page - effect.position - 1
    return slots, within(ask, evolve(effect, propose=room), len(held) * page) if room >= 0 else None


def within(ask: EffectRequest, effect: RunDecode, rows: int) -> EffectRequest:
    """It goes on alone as far as there are rows."""
    return alone(ask if effect is ask.effect else evolve(ask, effect=effect), rows - effect.position)


def alone(ask: EffectRequest, most: int) -> EffectRequest:
    """A decode step that goes on alone for so many steps at most."""
    effect = ask.effect
    if not isinstance(effect, RunDecode) or effect.steps <= max(1, most):
        return ask
    return evolve(ask, effect=evolve(effect, steps=max(1, most)))


def spared(
    slots: Slots, number: SlotId, count: int, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, Pages] | None:
    """So many pages more for a busy slot, where all that run can still come to their ends."""
    jobs = running(slots, requests)
    claims = {one: (slots.slots[one].pages, pages.claim(settings, job)) for one, job in jobs.items()}
    held, most = claims[number]
    for given_up in (None, *evictable(slots)):
        slots = slots if given_up is None else forget(slots, given_up)
        new = pages.free([slot.pages for slot in slots.slots], settings.pages, count)
        if new is not None:
            claims[number] = (*held, *new), most
            return (slots, new) if pages.safe(list(claims.values()), settings.pages) else None
    return None


def held_back(slots: Slots, requests: Mapping[RequestId, State], settings: Settings) -> Slots:
    """Whoever is next could not be admitted. Is a slot free, then pages are missing: nobody looks for them again before
    some come free."""
    free = [number for number, slot in enumerate(slots.slots) if slot.holder is None]
    request = following(slots, free, requests, settings)
    return slots if request is None else evolve(slots, short=slots.short | {request})
