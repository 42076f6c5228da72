"""Which models are on the device and which requests need them there. Changed by acknowledgements only."""

from __future__ import annotations

from attrs import evolve, frozen

from effects.all import Ask, Outcome
from effects.draft import DraftParked, DraftUnparked, ParkDraft
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


def may_leave(models: Residency, settings: Settings) -> bool:
    """The last lease is gone, and the policy does not keep the weights loaded between requests."""
    return models.draft_loaded and not models.leases and not settings.keep_draft


def acknowledged(models: Residency, ask: Ask, outcome: Outcome) -> Residency:
    """What really happened to the weights; a failure leaves the previous state."""
    if isinstance(outcome, DraftUnparked):
        return lease(evolve(models, draft_loaded=True), ask.request)
    if isinstance(outcome, DraftParked) and isinstance(ask.effect, ParkDraft):
        return evolve(models, draft_loaded=False)
    return models
