"""Residency: where the models' weights are, and which requests need them. Changed by acknowledgements only.

This is about the draft and the prompt scorer, which may leave the device between requests. The prompt scorer is called
`drafter` in options and in the JSON of the API (`PUBLIC_NAMES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from attrs import evolve, frozen

from effects.all import EffectRequest, Outcome
from effects.ids import DeviceFailed, ModelName, RequestId
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

Policy: TypeAlias = Literal["auto", "persistent", "request-scoped"]
Use: TypeAlias = Literal["draft", "scorer"]
After: TypeAlias = Literal["keep", "park", "release"]  # what becomes of a model's weights when no request needs them
# lost: it was loaded, and its process is gone. Requests that need it go on without it, and have it again when its
# process is there again.
WeightsLocation: TypeAlias = Literal["loaded", "parked", "released", "lost"]
PRESENT: frozenset[WeightsLocation] = frozenset(("loaded", "lost"))  # nothing has to be moved for a request

PUBLIC_NAMES: Mapping[ModelName, str] = {"scorer": "drafter"}  # of models, where JSON has another name than the core

IDLE_LOCATION: Mapping[After, WeightsLocation] = {"keep": "loaded", "park": "parked", "release": "released"}


def resolve_policy(policy: Policy, use: Use, *, low_memory: bool, has_draft: bool) -> After:
    """Return what becomes of one model's weights under a policy.

    A draft is parked in host memory rather than released, since the next request wants it. A prompt scorer is released,
    since few requests are compressed. `auto` keeps both on the device unless memory is short.

    low_memory: memory is short on the device of this model. has_draft: a draft was asked for.
    """
    if policy == "persistent":
        return "keep"
    if policy == "auto" and not low_memory:
        return "keep"
    if use == "scorer":
        return "release"
    return "park" if has_draft or policy == "request-scoped" else "keep"


@frozen
class Resolved:
    """The residency policy, and what follows from it for each model.

    A server makes it with `resolve_residency`. The defaults are for settings that tests make without a server.
    """

    policy: Policy = "auto"
    draft: After = "keep"
    scorer: After = "release"


def resolve_residency(
    policy: Policy,
    *,
    has_draft: bool,
    has_prompt_scorer: bool,
    low_memory: bool = False,
    scorer_low_memory: bool = False,
) -> tuple[Resolved, str]:
    """Return what the policy means for both models, and a message for the log if it had to be given up, or "".

    low_memory: memory is short on the draft's device. scorer_low_memory: the prompt scorer's device cannot keep it.
    """
    message = ""
    if policy == "request-scoped" and not (has_draft or has_prompt_scorer):
        message = "draft residency request-scoped: there is neither a draft nor a drafter; it is auto instead"
        policy = "auto"
        low_memory = False
        scorer_low_memory = False
    draft = resolve_policy(policy, "draft", low_memory=low_memory, has_draft=has_draft)
    prompt_scorer = resolve_policy(policy, "scorer", low_memory=scorer_low_memory, has_draft=has_draft)
    return Resolved(policy, draft, prompt_scorer), message


@frozen
class Residence:
    """The location of one model's weights, and the requests that have leased it."""

    location: WeightsLocation = "loaded"
    leases: tuple[RequestId, ...] = ()  # in order of arrival
    size_bytes: int = 0  # of its weights, as the last move reported; 0: not known
    moved_bytes: int = 0  # in all, both ways
    loads: int = 0
    parks: int = 0  # releases included
    failures: int = 0
    error: str = ""  # of the last failure


Models: TypeAlias = Mapping[ModelName, Residence]  # those whose location is decided here


def make_models(settings: ResidencySettings) -> Models:
    """Return where the models are at the start: where they go when no request needs them."""
    names: tuple[ModelName, ...] = ("draft", "scorer") if settings.scorer_max_tokens else ("draft",)
    return {name: Residence(IDLE_LOCATION[get_action_after_use(settings.residency, name)]) for name in names}


def get_action_after_use(residency: Resolved, name: ModelName) -> After:
    """Return what becomes of a model when no request needs it. The target is always kept."""
    return {"draft": residency.draft, "scorer": residency.scorer}.get(name, "keep")


def make_unload(residency: Resolved, name: ModelName) -> UnloadModel:
    """Return the effect that gives a model back. Its weights are parked unless the policy releases them."""
    return UnloadModel(name, keep=get_action_after_use(residency, name) != "release")


def add_lease(model: Residence, request: RequestId) -> Residence:
    """Return the model with one more request that needs it."""
    return evolve(model, leases=(*model.leases, request))


def remove_lease(model: Residence, request: RequestId) -> Residence:
    """Return the model without the lease of this request."""
    return evolve(model, leases=tuple(other for other in model.leases if other != request))


def answer_without_move(
    models: Models, effect_request: EffectRequest, residency: Resolved
) -> tuple[Models, ModelLoaded | ModelUnloaded | None]:
    """Return the outcome of an effect that moves no weights; None: it has to be launched.

    A loaded model is shared, and stays while any request has leased it. When the last lease ends it is unloaded, unless
    the policy keeps it between requests.
    """
    match effect_request.effect:
        case LoadModel(name) if models[name].location in PRESENT:
            return {**models, name: add_lease(models[name], effect_request.request)}, ModelLoaded(name=name)
        case UnloadModel(name):
            without = remove_lease(models[name], effect_request.request)
            if without.leases or get_action_after_use(residency, name) == "keep":
                return {**models, name: without}, ModelUnloaded()
        case _:
            pass
    return models, None


def record_move(models: Models, effect_request: EffectRequest, outcome: Outcome) -> Models:
    """Return the models after what really happened to their weights. A move that failed leaves them where they were."""
    match effect_request.effect, outcome:
        case LoadModel(name), ModelLoaded(size):
            model = add_lease(record_load(models[name], size), effect_request.request)
        case LoadModel(name), DeviceFailed():
            model = record_failure(models[name], outcome)
        case UnloadModel(name, keep), ModelUnloaded(size):
            unloaded = record_unload(models[name], size, "parked" if keep else "released")
            model = remove_lease(unloaded, effect_request.request)
        case UnloadModel(name), DeviceFailed():
            model = remove_lease(record_failure(models[name], outcome), effect_request.request)
        case _:
            return models
    return {**models, name: model}


def record_process_change(models: Models, name: ModelName, *, is_there: bool) -> Models:
    """Return the models after the process of one has gone, or is there again.

    A model that is parked has nothing to lose. What it is asked next fails until its process is there again.
    """
    model = models[name]
    before: WeightsLocation = "lost" if is_there else "loaded"
    after: WeightsLocation = "loaded" if is_there else "lost"
    return {**models, name: evolve(model, location=after)} if model.location == before else models


def record_load(model: Residence, size: int) -> Residence:
    """Return the model after its weights were loaded. size: bytes that were moved; 0: not known."""
    return evolve(
        model,
        location="loaded",
        loads=model.loads + 1,
        size_bytes=size or model.size_bytes,
        moved_bytes=model.moved_bytes + size,
    )


def record_unload(model: Residence, size: int, location: WeightsLocation) -> Residence:
    """Return the model after its weights have left the device. size: bytes that were moved; 0: not known."""
    return evolve(
        model,
        location=location,
        parks=model.parks + 1,
        size_bytes=size or model.size_bytes,
        moved_bytes=model.moved_bytes + size,
    )


def record_failure(model: Residence, why: DeviceFailed) -> Residence:
    """Return the model after a failed move. A move that was abandoned before its turn says nothing about the model."""
    if why.kind == "abandoned":
        return model
    return evolve(model, failures=model.failures + 1, error=f"{why.kind}: {why.detail}")


class ResidencySettings(Protocol):
    """The settings that residency depends on."""

    @property
    def residency(self) -> Resolved: ...

    @property
    def max_proposals(self) -> int: ...

    @property
    def scorer_max_tokens(self) -> int: ...


@frozen
class ModelResidency:
    """The location of one model's weights as /props shows it. Bytes are those of its weights, by where they are.

    moved_bytes: in all, both ways. leases: requests that need it now. parks: releases included.
    """

    state: WeightsLocation
    after_use: After
    device_bytes: int
    host_bytes: int
    moved_bytes: int
    leases: int
    loads: int
    parks: int
    failures: int
    last_error: str | None


@frozen
class ResidencyReport:
    """The residency of both models as /props shows it. None stands for a model that is not there."""

    policy: Policy
    draft: ModelResidency | None
    drafter: ModelResidency | None  # the prompt scorer


def describe_residency(
    models: Models, settings: ResidencySettings, held: Mapping[str, tuple[int, int]] | None = None
) -> ResidencyReport:
    """Return the policy, and where each model is: `/props.runtime.draft_residency`.

    held: by public name, bytes of a model's weights on its device and in host memory, as its executor counts them.
    Without it they are what the last moves reported.
    """
    found = held or {}
    return ResidencyReport(
        settings.residency.policy,
        describe_model(models, settings, "draft", found) if settings.max_proposals else None,
        describe_model(models, settings, "scorer", found) if settings.scorer_max_tokens else None,
    )


def describe_model(
    models: Models, settings: ResidencySettings, name: ModelName, held: Mapping[str, tuple[int, int]]
) -> ModelResidency:
    """Return the residency of one model. held: see `describe_residency`."""
    model = models[name]
    device = model.size_bytes * (model.location == "loaded")
    host = model.size_bytes * (model.location == "parked")
    device, host = held.get(PUBLIC_NAMES.get(name, name), (device, host))
    return ModelResidency(
        model.location,
        get_action_after_use(settings.residency, name),
        device,
        host,
        model.moved_bytes,
        len(model.leases),
        model.loads,
        model.parks,
        model.failures,
        model.error or None,
    )
