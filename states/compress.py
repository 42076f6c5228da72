"""Transitions of LoadingScorer, Compressing and UnloadingScorer: the prompt scorer shortens a prompt.

The scorer is loaded, scores the prompt piece by piece, picks the tokens that are kept, and is given back. A failure on
the way serves the prompt as it is, if it fits the context. In options the scorer is called `drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import evolve

from effects.compression import Compressed, PromptPart, select_remaining_spans, select_tokens
from effects.ids import DeviceFailed, Span, Tokens
from effects.job import find_aged_messages, freezes_messages
from effects.prompt_compression import CompressPrompt, KeepFrozen, PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded, UnloadModel
from effects.stream import CloseStream, Finish
from states import policy
from states.events import Cancelled, SlotEmptied
from states.kept_rows import continue_lease
from states.lookup import ReopenAndServe, reopen_and_serve
from states.machine import Transition, prepend_effect
from states.phases import forget_all_rows, unload_model
from states.recover import LOST_TWICE
from states.reports import make_report
from states.request_states import (
    FINISH,
    Compressing,
    Done,
    LoadingScorer,
    Parking,
    Prompt,
    RequestRemainder,
    SlotLease,
    UnloadingScorer,
    Yielding,
)
from states.settings import DecisionContext, Settings

RefusePrompt: TypeAlias = Transition[Done, CloseStream]
ReleaseScorer: TypeAlias = Transition[UnloadingScorer, UnloadModel]
FreezeAndRelease: TypeAlias = Transition[UnloadingScorer, KeepFrozen, UnloadModel]

FAILED = "the drafter that would shorten it failed, and as it is it does not fit"
TOO_LONG = "not enough of it could be left out"


def start_scoring(
    state: LoadingScorer, _: ModelLoaded, context: DecisionContext
) -> Transition[Compressing, CompressPrompt]:
    """Begin to score the whole prompt or, where messages are frozen one by one, only those that have aged.

    `CompressPrompt.most` is then the context less the tokens of the answer, and 0 for messages, which have no common
    limit.
    """
    prompt = state.prompt
    job = prompt.job
    if freezes_messages(job):
        scoring = CompressPrompt(0, job.prompt, parts=find_aged_messages(job), apart=True)
    else:
        most = context.settings.max_context - job.max_tokens
        scoring = CompressPrompt(0, prompt.tokens, policy.count_kept_tokens(job), most, job.compression.parts)
    return Transition(Compressing(state.slot_lease, prompt), scoring)


def serve_without_scorer(
    state: LoadingScorer, event: DeviceFailed, context: DecisionContext
) -> ReopenAndServe | RefusePrompt:
    """Serve the prompt as it is, because the scorer could not be loaded."""
    return serve_or_refuse(context, state.slot_lease, keep_prompt_whole(state.prompt, f"drafter_{event.kind}"))


def continue_scoring(
    state: Compressing, event: PromptScored, _: DecisionContext
) -> Transition[Compressing, CompressPrompt]:
    """Score the next part of the prompt."""
    return Transition(state, CompressPrompt(event.stop))


def adopt_compressed_prompt(
    state: Compressing, event: PromptCompressed, context: DecisionContext
) -> ReleaseScorer | FreezeAndRelease:
    """Serve the tokens that were kept from now on, and give the scorer back."""
    prompt = state.prompt
    if freezes_messages(prompt.job):
        return freeze_messages(context, state, event)
    if len(event.prompt) >= len(prompt.tokens):
        whole = keep_prompt_whole(prompt, "not_shorter", event.ns)
        return release_prompt_scorer(context, state.slot_lease, whole)
    keep = prompt.job.compression.keep
    compression = Compressed(len(prompt.tokens), "", event.kept, event.forced, keep, event.ns)
    prompt = evolve(prompt, compression=compression)
    slot_lease, prompt = replace_served_tokens(context.settings, state.slot_lease, prompt, event.prompt)
    return release_prompt_scorer(context, slot_lease, prompt)


def freeze_messages(context: DecisionContext, state: Compressing, event: PromptCompressed) -> FreezeAndRelease:
    """Serve what is kept of the messages, and have it remembered for later turns of the conversation.

    Messages of which nothing could be left out are remembered as well, so that they are not scored again.
    """
    job = state.prompt.job
    frozen = {part: select_spans_within(event.kept, part) for part in find_aged_messages(job)}
    parts = [evolve(part, kept=frozen.get(part, part.kept)) for part in job.compression.parts]
    spans = select_remaining_spans(parts, len(job.prompt))
    tokens = select_tokens(job.prompt, spans)
    why_not = "" if len(tokens) < len(state.prompt.tokens) else "not_shorter"
    compression = Compressed(len(job.prompt), why_not, spans, event.forced, job.compression.keep, event.ns)
    prompt = evolve(state.prompt, compression=compression)
    slot_lease, prompt = replace_served_tokens(context.settings, state.slot_lease, prompt, tokens)
    kept_by_name = tuple((part.name, kept) for part, kept in frozen.items())
    return prepend_effect(KeepFrozen(kept_by_name), release_prompt_scorer(context, slot_lease, prompt))


def replace_served_tokens(
    settings: Settings, slot_lease: SlotLease, prompt: Prompt, tokens: Tokens
) -> tuple[SlotLease, Prompt]:
    """Serve these tokens from now on. Only rows that they share with the tokens served before stay valid."""
    slot_lease = continue_lease(settings, slot_lease, prompt.tokens[: slot_lease.rows], tokens)
    return slot_lease, evolve(prompt, tokens=tokens, compression_tried=True, stored_rows=0)


def select_spans_within(spans: Sequence[Span], part: PromptPart) -> tuple[Span, ...]:
    """Return the spans of the prompt that are inside a part, counted from the start of the part."""
    return tuple(
        (start - part.start, stop - part.start) for start, stop in spans if part.start <= start < stop <= part.stop
    )


def give_up_compression(state: Compressing, event: DeviceFailed, context: DecisionContext) -> ReleaseScorer:
    """Give the scorer back and serve the prompt as it is, because scoring has failed."""
    whole = keep_prompt_whole(state.prompt, f"drafter_{event.kind}")
    return release_prompt_scorer(context, state.slot_lease, whole)


def release_prompt_scorer(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> ReleaseScorer:
    """Give the scorer back. `prompt` is served afterwards."""
    return Transition(UnloadingScorer(slot_lease, prompt), unload_model(context.settings, "scorer"))


def serve_released_prompt(
    state: UnloadingScorer, _: ModelUnloaded | DeviceFailed, context: DecisionContext
) -> ReopenAndServe | RefusePrompt:
    """Serve the prompt. Whether the scorer could be unloaded does not matter to this request."""
    return serve_or_refuse(context, state.slot_lease, state.prompt)


def cancel_while_releasing(
    state: UnloadingScorer, event: Cancelled, context: DecisionContext
) -> Transition[Parking, CloseStream]:
    """Close the stream. The effect that gives the scorer back is in flight already."""
    closing = CloseStream(FINISH[event.reason], make_report(context, state), event.reason)
    return Transition(Parking(RequestRemainder(state.slot_lease, state.prompt, leased_model="scorer")), closing)


def recover_while_releasing(
    state: UnloadingScorer, _: SlotEmptied, context: DecisionContext
) -> Transition[Yielding] | Transition[Parking, CloseStream]:
    """Wait for a slot again once the scorer is given back, or fail if the rows were lost before."""
    left = forget_all_rows(RequestRemainder(state.slot_lease, state.prompt, leased_model="scorer"))
    if state.prompt.heard_tokens is not None:
        return Transition(Parking(left), CloseStream("lost", make_report(context, state), LOST_TWICE))
    return Transition(Yielding(evolve(left, prompt=evolve(left.prompt, heard_tokens=()))))


def keep_prompt_whole(prompt: Prompt, why_not: str, ns: int = 0) -> Prompt:
    """Return the prompt with the reason why no token of it was left out. It is not compressed a second time.

    ns: nanoseconds that the scorer took.
    """
    before = prompt.compression or Compressed(len(prompt.job.prompt))
    return evolve(prompt, compression_tried=True, compression=evolve(before, why_not=why_not, ns=ns))


def serve_or_refuse(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> ReopenAndServe | RefusePrompt:
    """Serve the prompt if it fits the context now, and refuse it otherwise."""
    if policy.fits_context(context.settings, prompt):
        return reopen_and_serve(context, slot_lease, prompt)
    compression = prompt.compression
    scorer_worked = compression is None or compression.why_not in {"", "not_shorter"}
    why: Finish = "too_long" if scorer_worked else "uncompressed"
    detail = TOO_LONG if scorer_worked else FAILED
    closing = CloseStream(why, make_report(context, UnloadingScorer(slot_lease, prompt)), detail)
    return Transition(Done(RequestRemainder(slot_lease, prompt)), closing)
