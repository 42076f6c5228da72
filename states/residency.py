"""Where the models' weights are and which requests need them there. Changed by acknowledgements only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from attrs import evolve, field, frozen

from effects.all import Ask, Outcome
from effects.draft import DraftParked, DraftUnparked, ParkDraft, UnparkDraft
from effects.ids import DeviceFailed, RequestId

Policy: TypeAlias = Literal["auto", "persistent", "request-scoped"]
Use: TypeAlias = Literal["draft", "drafter"]
After: TypeAlias = Literal["keep", "park", "release"]  # what becomes of a model's weights when nobody needs them
Place: TypeAlias = Literal["loaded", "parked", "released"]

IDLE: Mapping[After, Place] = {"keep": "loaded", "park": "parked", "release": "released"}


def resolve(policy: Policy, use: Use, *, low_memory: bool, has_draft: bool) -> After:
    """The one rule for both models: a draft is parked, since the next request wants it; a drafter is released.

    `auto` keeps a draft unless memory is said to be low, and never the drafter: it stands idle through all decoding.
    """
    if policy == "persistent":
        return "keep"
    if use == "drafter":
        return "release"
    if policy == "request-scoped":
        return "park"
    return "park" if low_memory and has_draft else "keep"


@frozen
class Resolved:
    """The policy, and what it comes to here."""

    policy: Policy = "auto"
    draft: After = "keep"
    drafter: After = "release"


def resolved(policy: Policy, *, has_draft: bool, has_drafter: bool, low_memory: bool = False) -> tuple[Resolved, str]:
    """The outcome for both uses, and a message for the log where the policy had to be given up."""
    message = ""
    if policy == "request-scoped" and not (has_draft or has_drafter):
        message = "draft residency request-scoped: there is neither a draft nor a drafter; it is auto instead"
        policy, low_memory = "auto", False
    draft = resolve(policy, "draft", low_memory=low_memory, has_draft=has_draft)
    drafter = resolve(policy, "drafter", low_memory=low_memory, has_draft=has_draft)
    return Resolved(policy, draft, drafter), message


@frozen
class Model:
    """One model's weights, and who needs them."""

    place: Place = "loaded"
    leases: tuple[RequestId, ...] = ()  # in order of arrival
    size: int = 0  # bytes of its weights, as the last move told; 0: never told
    moved: int = 0  # bytes in all, both ways
    loads: int = 0
    parks: int = 0  # releases included
    failures: int = 0
    error: str = ""  # of the last failure


@frozen
class Residency:
    draft: Model = field(factory=Model)


def boot(residency: Resolved) -> Residency:
    """What the executors start with: a model that nobody needs yet is where it goes when nobody needs it."""
    return Residency(Model(IDLE[residency.draft]))


def lease(model: Model, request: RequestId) -> Model:
    return evolve(model, leases=(*model.leases, request))


def give_back(model: Model, request: RequestId) -> Model:
    return evolve(model, leases=tuple(other for other in model.leases if other != request))


def at_once(models: Residency, ask: Ask, residency: Resolved) -> tuple[Residency, DraftUnparked | DraftParked | None]:
    """The outcome of what moves no weights: a loaded draft is shared, and stays while somebody needs it.

    The last lease sends it away, unless the policy keeps it between requests.
    """
    match ask.effect:
        case UnparkDraft() if models.draft.place == "loaded":
            return evolve(models, draft=lease(models.draft, ask.request)), DraftUnparked()
        case ParkDraft():
            without = give_back(models.draft, ask.request)
            if without.leases or residency.draft == "keep":
                return evolve(models, draft=without), DraftParked()
        case _:
            pass
    return models, None


def acknowledged(models: Residency, ask: Ask, outcome: Outcome) -> Residency:
    """What really happened to the weights. A move is a transaction: one that failed leaves them where they were."""
    draft = models.draft
    match ask.effect, outcome:
        case UnparkDraft(), DraftUnparked(size):
            draft = lease(arrived(draft, size), ask.request)
        case UnparkDraft(), DeviceFailed():
            draft = failed(draft, outcome)
        case ParkDraft(release), DraftParked(size):
            draft = give_back(left(draft, size, "released" if release else "parked"), ask.request)
        case ParkDraft(), DeviceFailed():
            draft = give_back(failed(draft, outcome), ask.request)
        case _:
            return models
    return evolve(models, draft=draft)


def arrived(model: Model, size: int) -> Model:
    return evolve(model, place="loaded", loads=model.loads + 1, size=size or model.size, moved=model.moved + size)


def left(model: Model, size: int, place: Place) -> Model:
    return evolve(model, place=place, parks=model.parks + 1, size=size or model.size, moved=model.moved + size)


def failed(model: Model, why: DeviceFailed) -> Model:
    """A request that was abandoned before it got its turn says nothing about the model."""
    if why.kind == "abandoned":
        return model
    return evolve(model, failures=model.failures + 1, error=f"{why.kind}: {why.detail}")


class Deciding(Protocol):
    """Settings, as far as residency goes."""

    @property
    def residency(self) -> Resolved: ...

    @property
    def block(self) -> int: ...


def shown(
    models: Residency, settings: Deciding, held: Mapping[str, tuple[int, int]] | None = None
) -> Mapping[str, Any]:
    """`/props.runtime.draft_residency`: the policy, and where each model really is; None for one that there is not.

    held: bytes of its weights (on its device, in host memory), as its executor counts them; without, what the
    acknowledgements told.
    """
    draft = shown_model(models.draft, settings.residency.draft, (held or {}).get("draft")) if settings.block else None
    return {"policy": settings.residency.policy, "draft": draft, "drafter": None}


def shown_model(model: Model, after: After, held: tuple[int, int] | None) -> Mapping[str, Any]:
    device, host = held or (model.size * (model.place == "loaded"), model.size * (model.place == "parked"))
    return {
        "state": model.place,
        "after_use": after,
        "device_bytes": device,
        "host_bytes": host,
        "moved_bytes": model.moved,
        "leases": len(model.leases),
        "loads": model.loads,
        "parks": model.parks,
        "failures": model.failures,
        "last_error": model.error or None,
    }
