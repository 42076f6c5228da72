"""Which models are on the device and which requests need them there. Changed by acknowledgements only."""

from __future__ import annotations

from attrs import evolve, frozen

from effects.all import Ask, Outcome
from effects.draft import DraftParked, DraftUnparked, ParkDraft, UnparkDraft
from effects.ids import RequestId
from states.settings import Settings


@frozen
class Residency:
    draft_loaded: bool = False
    leases: tuple[RequestId, ...] = ()  # who needs the draft, in order of arrival


def lease(models: Residency, request: RequestId) -> Residency:
    return evolve(models, leases=(*models.leases, request))


def give_back(models: Residency, request: RequestId) -> Residency:
    return evolve(models, leases=tuple(other for other in models.leases if other != request))


def at_once(models: Residency, ask: Ask, settings: Settings) -> tuple[Residency, DraftUnparked | DraftParked | None]:
    """The outcome of what moves no weights: a loaded draft is shared, and stays while somebody needs it.

    The last lease unloads it, unless the policy keeps it between requests.
    """
    match ask.effect:
        case UnparkDraft() if models.draft_loaded:
            return lease(models, ask.request), DraftUnparked()
        case ParkDraft():
            without = give_back(models, ask.request)
            if without.leases or settings.keep_draft:
                return without, DraftParked()
        case _:
            pass
    return models, None


def acknowledged(models: Residency, ask: Ask, outcome: Outcome) -> Residency:
    """What really happened to the weights; a failure leaves the previous state."""
    if isinstance(outcome, DraftUnparked):
        return lease(evolve(models, draft_loaded=True), ask.request)
    if isinstance(ask.effect, ParkDraft):
        return evolve(give_back(models, ask.request), draft_loaded=not isinstance(outcome, DraftParked))
    return models
