"""Where the models' weights are and which requests need them there. Changed by acknowledgements only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from attrs import evolve, frozen

from effects.all import EffectRequest, Outcome
from effects.ids import DeviceFailed, ModelName, RequestId
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

Policy: TypeAlias = Literal["auto", "persistent", "request-scoped"]
Use: TypeAlias = Literal["draft", "drafter"]
After: TypeAlias = Literal["keep", "park", "release"]  # what becomes of a model's weights when nobody needs them
# lost: it was loaded, and its process is gone; whoever needs it goes on without, and has it again when it is there.
StateCheckpoint: TypeAlias = Literal["loaded", "parked", "released", "lost"]
PRESENT: frozenset[StateCheckpoint] = frozenset(("loaded", "lost"))  # nothing has to be moved for whoever needs it

IDLE: Mapping[After, StateCheckpoint] = {"keep": "loaded", "park": "parked", "release": "released"}


def resolve(policy: Policy, use: Use, *, low_memory: bool, has_draft: bool) -> After:
    """Return what becomes of a model's weights when no request needs them. The one rule for both models.

    A draft is parked, since the next request wants it. A drafter is released, since few requests are compressed.
    `auto` keeps both unless memory is short.

    low_memory: memory is short on the device of this model. has_draft: a draft was asked for.
    """
    if policy == "persistent":
        return "keep"
    if policy == "auto" and not low_memory:
        return "keep"
    if use == "drafter":
        return "release"
    return "park" if has_draft or policy == "request-scoped" else "keep"


@frozen
class Resolved:
    """The policy, and what it comes to here. A server always resolves it; the defaults are of settings made by hand."""

    policy: Policy = "auto"
    draft: After = "keep"
    drafter: After = "release"


def resolved(
    policy: Policy,
    *,
    has_draft: bool,
    has_drafter: bool,
    low_memory: bool = False,
    drafter_low_memory: bool = False,
) -> tuple[Resolved, str]:
    """Return the outcome for both uses, and a message for the log where the policy had to be given up.

    low_memory: memory is short on the draft's device. drafter_low_memory: the drafter's device cannot keep it.
    """
    message = ""
    if policy == "request-scoped" and not (has_draft or has_drafter):
        message = "draft residency request-scoped: there is neither a draft nor a drafter; it is auto instead"
        policy, low_memory, drafter_low_memory = "auto", False, False
    draft = resolve(policy, "draft", low_memory=low_memory, has_draft=has_draft)
    drafter = resolve(policy, "drafter", low_memory=drafter_low_memory, has_draft=has_draft)
    return Resolved(policy, draft, drafter), message


@frozen
class Residence:
    """Where one model's weights are, and who needs them there."""

    place: StateCheckpoint = "loaded"
    leases: tuple[RequestId, ...] = ()  # in order of arrival
    size: int = 0  # bytes of its weights, as the last move told; 0: never told
    moved: int = 0  # bytes in all, both ways
    loads: int = 0
    parks: int = 0  # releases included
    failures: int = 0
    error: str = ""  # of the last failure


Models: TypeAlias = Mapping[ModelName, Residence]  # those whose place is decided here


def boot(settings: Deciding) -> Models:
    """What the executors start with: a model that nobody needs yet is where it goes when nobody needs it."""
    names: tuple[ModelName, ...] = ("draft", "drafter") if settings.drafter else ("draft",)
    return {name: Residence(IDLE[after_use(settings.residency, name)]) for name in names}


def after_use(residency: Resolved, name: ModelName) -> After:
    return {"draft": residency.draft, "drafter": residency.drafter}.get(name, "keep")


def unload(residency: Resolved, name: ModelName) -> UnloadModel:
    return UnloadModel(name, keep=after_use(residency, name) != "release")


def lease(model: Residence, request: RequestId) -> Residence:
    return evolve(model, leases=(*model.leases, request))


def give_back(model: Residence, request: RequestId) -> Residence:
    return evolve(model, leases=tuple(other for other in model.leases if other != request))


def at_once(
    models: Models, ask: EffectRequest, residency: Resolved
) -> tuple[Models, ModelLoaded | ModelUnloaded | None]:
    """The outcome of what moves no weights: a loaded model is shared, and stays while somebody needs it.

    The last lease sends it away, unless the policy keeps it between requests.
    """
    match ask.effect:
        case LoadModel(name) if models[name].place in PRESENT:
            return {**models, name: lease(models[name], ask.request)}, ModelLoaded(name=name)
        case UnloadModel(name):
            without = give_back(models[name], ask.request)
            if without.leases or after_use(residency, name) == "keep":
                return {**models, name: without}, ModelUnloaded()
        case _:
            pass
    return models, None


def acknowledged(models: Models, ask: EffectRequest, outcome: Outcome) -> Models:
    """What really happened to the weights. A move is a transaction: one that failed leaves them where they were."""
    match ask.effect, outcome:
        case LoadModel(name), ModelLoaded(size):
            model = lease(arrived(models[name], size), ask.request)
        case LoadModel(name), DeviceFailed():
            model = failed(models[name], outcome)
        case UnloadModel(name, keep), ModelUnloaded(size):
            model = give_back(left(models[name], size, "parked" if keep else "released"), ask.request)
        case UnloadModel(name), DeviceFailed():
            model = give_back(failed(models[name], outcome), ask.request)
        case _:
            return models
    return {**models, name: model}


def reached(models: Models, name: ModelName, *, there: bool) -> Models:
    """The model's process has gone, or there is one again. One that is parked has nothing to lose: what is asked of it
    next will fail until there is one.
    """
    model = models[name]
    before: StateCheckpoint = "lost" if there else "loaded"
    after: StateCheckpoint = "loaded" if there else "lost"
    return {**models, name: evolve(model, place=after)} if model.place == before else models


def arrived(model: Residence, size: int) -> Residence:
    return evolve(model, place="loaded", loads=model.loads + 1, size=size or model.size, moved=model.moved + size)


def left(model: Residence, size: int, place: StateCheckpoint) -> Residence:
    return evolve(model, place=place, parks=model.parks + 1, size=size or model.size, moved=model.moved + size)


def failed(model: Residence, why: DeviceFailed) -> Residence:
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

    @property
    def drafter(self) -> int: ...


def shown(models: Models, settings: Deciding, held: Mapping[str, tuple[int, int]] | None = None) -> Mapping[str, Any]:
    """`/props.runtime.draft_residency`: the policy, and where each model really is; None for one that there is not.

    held: bytes of its weights (on its device, in host memory), as its executor counts them; without, what the
    acknowledgements told.
    """
    there: Mapping[ModelName, bool] = {"draft": settings.block > 0, "drafter": settings.drafter > 0}
    told: dict[str, Any] = {
        name: shown_model(models[name], after_use(settings.residency, name), (held or {}).get(name)) if one else None
        for name, one in there.items()
    }
    return {"policy": settings.residency.policy, **told}


def shown_model(model: Residence, after: After, held: tuple[int, int] | None) -> Mapping[str, Any]:
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
