"""Fetching, Compressing, Releasing: the drafter comes, a prompt is scored piece by piece, and the drafter goes."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.compression import Compressed
from effects.ids import DeviceFailed
from effects.pflash import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded, UnloadModel
from effects.stream import CloseStream, Finish
from states import policy
from states.events import Cancelled, SlotEmptied
from states.life import FINISH, Compressing, Done, Fetching, Parking, Prompt, Releasing, Remains, Seat, Yielding, serve
from states.lookup import Served, served
from states.machine import Then
from states.onward import emptied, park, report
from states.recover import TWICE
from states.settings import Known

Refused: TypeAlias = Then[Done, CloseStream]
GivenBack: TypeAlias = Then[Releasing, UnloadModel]

FAILED = "the drafter that would shorten it failed, and as it is it does not fit"
TOO_LONG = "not enough of it could be left out"


def fetched(state: Fetching, _: ModelLoaded, known: Known) -> Then[Compressing, CompressPrompt]:
    prompt = state.prompt
    keep, most = policy.kept_tokens(prompt.job), known.settings.max_context - prompt.job.max_tokens
    first = CompressPrompt(0, prompt.tokens, keep, most, prompt.job.compression.parts)
    return Then(Compressing(state.seat, prompt), first)


def unfetched(state: Fetching, event: DeviceFailed, known: Known) -> Served | Refused:
    """A drafter that does not come serves the prompt as it is."""
    return decided(known, state.seat, verbatim(state.prompt, f"drafter_{event.kind}"))


def scored(state: Compressing, event: PromptScored, _: Known) -> Then[Compressing, CompressPrompt]:
    return Then(state, CompressPrompt(event.stop))


def compressed(state: Compressing, event: PromptCompressed, known: Known) -> GivenBack:
    seat, prompt = state.seat, state.prompt
    if len(event.prompt) >= len(prompt.tokens):
        return release(known, seat, verbatim(prompt, "not_shorter", event.ns))
    keep = prompt.job.compression.keep
    told = Compressed(len(prompt.tokens), "", event.kept, event.forced, keep, event.ns)
    seat, prompt = serve(known.settings, seat, evolve(prompt, compression=told), event.prompt)
    return release(known, seat, prompt)


def failed(state: Compressing, event: DeviceFailed, known: Known) -> GivenBack:
    return release(known, state.seat, verbatim(state.prompt, f"drafter_{event.kind}"))


def release(known: Known, seat: Seat, prompt: Prompt) -> GivenBack:
    return Then(Releasing(seat, prompt), park(known.settings, "drafter"))


def released(state: Releasing, _: ModelUnloaded | DeviceFailed, known: Known) -> Served | Refused:
    """Whether or not it could be sent away, the request has nothing to do with it any more."""
    return decided(known, state.seat, state.prompt)


def leave(state: Releasing, event: Cancelled, known: Known) -> Then[Parking, CloseStream]:
    closing = CloseStream(FINISH[event.reason], report(known, state), event.reason)
    return Then(Parking(Remains(state.seat, state.prompt, leased="drafter")), closing)


def lost(state: Releasing, _: SlotEmptied, known: Known) -> Then[Yielding] | Then[Parking, CloseStream]:
    """As any loss of its slot's rows, only that what is in flight is the giving back already."""
    left = emptied(Remains(state.seat, state.prompt, leased="drafter"))
    if state.prompt.heard is not None:
        return Then(Parking(left), CloseStream("failed", report(known, state), TWICE))
    return Then(Yielding(evolve(left, prompt=evolve(left.prompt, heard=()))))


def verbatim(prompt: Prompt, why: str, ns: int = 0) -> Prompt:
    """A failed compression serves the prompt as it is; what is kept of it is looked for again."""
    return evolve(prompt, compressed=True, compression=Compressed(len(prompt.tokens), why, ns=ns))


def decided(known: Known, seat: Seat, prompt: Prompt) -> Served | Refused:
    """What is to be served is certain, if it can be served at all."""
    if policy.fits(known.settings, prompt):
        return served(known, seat, prompt)
    told = prompt.compression
    short = told is None or told.why_not == "not_shorter"
    why: Finish = "too_long" if short else "uncompressed"
    closing = CloseStream(why, report(known, Releasing(seat, prompt)), TOO_LONG if short else FAILED)
    return Then(Done(Remains(seat, prompt)), closing)
