"""Fetching, Compressing, Releasing: the drafter comes, a prompt is scored piece by piece, and the drafter goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import evolve

from effects.compression import Compressed, PromptPart, remaining, taken
from effects.ids import DeviceFailed, Span, Tokens
from effects.job import aged, freezes
from effects.pflash import CompressPrompt, KeepFrozen, PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded, UnloadModel
from effects.stream import CloseStream, Finish
from states import policy
from states.events import Cancelled, SlotEmptied
from states.lookup import Served, served
from states.machine import Transition, first
from states.phases import emptied, park, report
from states.recover import TWICE
from states.request_states import (
    FINISH,
    Compressing,
    Done,
    Fetching,
    Parking,
    Prompt,
    Releasing,
    RequestRemainder,
    SlotLease,
    Yielding,
    continuing,
)
from states.settings import DecisionContext, Settings

Refused: TypeAlias = Transition[Done, CloseStream]
GivenBack: TypeAlias = Transition[Releasing, UnloadModel]
Frozen: TypeAlias = Transition[Releasing, KeepFrozen, UnloadModel]

FAILED = "the drafter that would shorten it failed, and as it is it does not fit"
TOO_LONG = "not enough of it could be left out"


def fetched(state: Fetching, _: ModelLoaded, known: DecisionContext) -> Transition[Compressing, CompressPrompt]:
    prompt, job = state.prompt, state.prompt.job
    if freezes(job):
        return Transition(Compressing(state.seat, prompt), CompressPrompt(0, job.prompt, parts=aged(job), apart=True))
    keep, most = policy.kept_tokens(job), known.settings.max_context - job.max_tokens
    asking = CompressPrompt(0, prompt.tokens, keep, most, job.compression.parts)
    return Transition(Compressing(state.seat, prompt), asking)


def unfetched(state: Fetching, event: DeviceFailed, known: DecisionContext) -> Served | Refused:
    """A drafter that does not come serves the prompt as it is."""
    return decided(known, state.seat, verbatim(state.prompt, f"drafter_{event.kind}"))


def scored(state: Compressing, event: PromptScored, _: DecisionContext) -> Transition[Compressing, CompressPrompt]:
    return Transition(state, CompressPrompt(event.stop))


def compressed(state: Compressing, event: PromptCompressed, known: DecisionContext) -> GivenBack | Frozen:
    seat, prompt = state.seat, state.prompt
    if freezes(prompt.job):
        return froze(known, state, event)
    if len(event.prompt) >= len(prompt.tokens):
        return release(known, seat, verbatim(prompt, "not_shorter", event.ns))
    keep = prompt.job.compression.keep
    told = Compressed(len(prompt.tokens), "", event.kept, event.forced, keep, event.ns)
    seat, prompt = serve(known.settings, seat, evolve(prompt, compression=told), event.prompt)
    return release(known, seat, prompt)


def froze(known: DecisionContext, state: Compressing, event: PromptCompressed) -> Frozen:
    """Messages are what they were frozen to from now on, also those of which nothing could be left out."""
    seat, job = state.seat, state.prompt.job
    made = {part: within(event.kept, part) for part in aged(job)}
    parts = [evolve(part, kept=made.get(part, part.kept)) for part in job.compression.parts]
    spans = remaining(parts, len(job.prompt))
    tokens, keep = taken(job.prompt, spans), job.compression.keep
    why = "" if len(tokens) < len(state.prompt.tokens) else "not_shorter"
    told = Compressed(len(job.prompt), why, spans, event.forced, keep, event.ns)
    seat, prompt = serve(known.settings, seat, evolve(state.prompt, compression=told), tokens)
    named = tuple((part.name, kept) for part, kept in made.items())
    return first(KeepFrozen(named), release(known, seat, prompt))


def serve(settings: Settings, seat: SlotLease, prompt: Prompt, tokens: Tokens) -> tuple[SlotLease, Prompt]:
    """From now on these are what is served; only rows that they share with what was stay valid."""
    seat = continuing(settings, seat, prompt.tokens[: seat.rows], tokens)
    return seat, evolve(prompt, tokens=tokens, compressed=True, stored=0)


def within(spans: Sequence[Span], part: PromptPart) -> tuple[Span, ...]:
    """Those of the prompt that are in the part, from its start on."""
    return tuple(
        (start - part.start, stop - part.start) for start, stop in spans if part.start <= start < stop <= part.stop
    )


def failed(state: Compressing, event: DeviceFailed, known: DecisionContext) -> GivenBack:
    return release(known, state.seat, verbatim(state.prompt, f"drafter_{event.kind}"))


def release(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> GivenBack:
    return Transition(Releasing(seat, prompt), park(known.settings, "drafter"))


def released(state: Releasing, _: ModelUnloaded | DeviceFailed, known: DecisionContext) -> Served | Refused:
    """Whether or not it could be sent away, the request has nothing to do with it any more."""
    return decided(known, state.seat, state.prompt)


def leave(state: Releasing, event: Cancelled, known: DecisionContext) -> Transition[Parking, CloseStream]:
    closing = CloseStream(FINISH[event.reason], report(known, state), event.reason)
    return Transition(Parking(RequestRemainder(state.seat, state.prompt, leased="drafter")), closing)


def lost(
    state: Releasing, _: SlotEmptied, known: DecisionContext
) -> Transition[Yielding] | Transition[Parking, CloseStream]:
    """As any loss of its slot's rows, only that what is in flight is the giving back already."""
    left = emptied(RequestRemainder(state.seat, state.prompt, leased="drafter"))
    if state.prompt.heard is not None:
        return Transition(Parking(left), CloseStream("lost", report(known, state), TWICE))
    return Transition(Yielding(evolve(left, prompt=evolve(left.prompt, heard=()))))


def verbatim(prompt: Prompt, why: str, ns: int = 0) -> Prompt:
    """A failed compression serves the prompt as it is; what is kept of it is looked for again."""
    before = prompt.compression or Compressed(len(prompt.job.prompt))
    return evolve(prompt, compressed=True, compression=evolve(before, why_not=why, ns=ns))


def decided(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Served | Refused:
    """What is to be served is certain, if it can be served at all."""
    if policy.fits(known.settings, prompt):
        return served(known, seat, prompt)
    told = prompt.compression
    short = told is None or told.why_not in {"", "not_shorter"}
    why: Finish = "too_long" if short else "uncompressed"
    closing = CloseStream(why, report(known, Releasing(seat, prompt)), TOO_LONG if short else FAILED)
    return Transition(Done(RequestRemainder(seat, prompt)), closing)
