"""What is worth keeping beyond the device: how many rows of a sequence, and where checkpoints go. Gives reasons."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from attrs import frozen

from effects.ids import Tokens
from effects.job import freezes
from effects.scope import Selection
from states.request_states import Prompt, RequestRemainder, SlotLease, kept
from states.sequences import alike, whole_blocks
from states.settings import Settings


def select(settings: Settings, left: RequestRemainder) -> Selection:
    """How many rows are kept: up to where the scope says, as far as they are valid, in whole blocks.

    Too few of them are not worth it: 0.
    """
    prompt, name = left.prompt, str(left.prompt.job.scope)
    if not settings.store:
        return Selection(name, "no_store")
    boundary, reason = reach(prompt, len(prompt.tokens) + len(left.answer))
    length = min(boundary, kept(settings, left))
    rows = whole_blocks(settings, length) if length >= settings.min_tokens else 0
    if boundary and not rows:
        reason = "too_short" if length else "no_rows"
    return Selection(name, reason, prompt.shared, boundary, rows)


def reach(prompt: Prompt, whole: int) -> tuple[int, str]:
    """How many tokens the scope takes, were they all valid and enough; and why so many. whole: the answer included."""
    job, scope = prompt.job, prompt.job.scope
    if scope.kind == "off":
        return 0, "scope_off"
    if scope.kind == "full":
        return whole, "whole"
    if rewritten(prompt):
        if not freezes(job):
            return 0, "rewritten"
        limit = prompt.shared if scope.kind == "auto" else scope.count
        return aligned(job.boundaries, min(limit, alike(job.prompt, prompt.tokens))), "frozen"
    if scope.kind == "auto":
        return shared(prompt)
    return (scope.count, "fixed") if scope.count <= len(prompt.tokens) else (0, "longer_than_prompt")


def shared(prompt: Prompt) -> tuple[int, str]:
    """`auto`: what the likest recent prompt begins with too, down to where a message opens, if any does."""
    if prompt.shared == 0:
        return 0, "nothing_shared"
    if not prompt.job.boundaries:
        return prompt.shared, "shared"
    boundary = aligned(prompt.job.boundaries, prompt.shared)
    return boundary, "boundary" if boundary else "no_boundary"


def rewritten(prompt: Prompt) -> bool:
    """Is something else served than was sent? Then of what `auto` and `fixed` keep, nobody would find anything again,
    unless messages were frozen: what both begin with is the system prompt.
    """
    return prompt.tokens is not prompt.job.prompt and prompt.tokens != prompt.job.prompt


def aligned(boundaries: Tokens, limit: int) -> int:
    """The last boundary up to `limit`, or 0."""
    before = bisect_right(boundaries, limit)
    return boundaries[before - 1] if before else 0


@frozen
class Mark:
    """Where prefill stops to keep the positional state: on the device, and, as the scope says, beyond it."""

    at: int
    beyond: bool


def mark(settings: Settings, seat: SlotLease, prompt: Prompt) -> Mark | None:
    """The next one after the valid rows. Nobody goes on from those whose logprobs were asked for."""
    if not settings.stateful or prompt.job.prompt_logprobs >= 0:
        return None
    beyond = {whole_blocks(settings, at) for at in positions(settings, seat, prompt) if at >= settings.min_tokens}
    here = {whole_blocks(settings, turning(settings, prompt))} if settings.state_places else set[int]()
    last = whole_blocks(settings, prompt.target)
    at = min((at for at in beyond | here if seat.valid < at <= last), default=None)
    return None if at is None else Mark(at, at in beyond)


def held(settings: Settings, seat: SlotLease, prompt: Prompt) -> bool:
    """Should the state that the slot has behind its valid rows be kept beyond the device?

    It should where a prefill from nothing would have kept it. The slot may have it from a request whose scope kept
    nothing, or the store may have lost it since. `full` also keeps the state between where the next turn comes back to
    and the end of the prompt: without it, whoever sends the same prompt again finds no state to go on from.
    """
    before = SlotLease(seat.slot, seat.valid - settings.block_size)
    if before.valid < 0 or seat.valid < settings.min_tokens:
        return False
    marked = mark(settings, before, prompt)
    if marked is not None and marked.beyond and marked.at == seat.valid:
        return True
    everything = settings.stateful and settings.store and prompt.job.scope.kind == "full"
    return (
        everything
        and prompt.job.prompt_logprobs < 0
        and seat.valid >= whole_blocks(settings, turning(settings, prompt))
    )


def passed(settings: Settings, prompt: Prompt, before: int, valid: int) -> bool:
    """Has decoding just gone past a position where `full` keeps the positional state, which the slot still has?"""
    if not (settings.stateful and settings.store and settings.interval and settings.keep_decoded):
        return False
    at = whole_blocks(settings, valid)
    marked = whole_blocks(settings, next_multiple(settings.interval, at)) == at  # one in this block
    return prompt.job.scope.kind == "full" and before < at and settings.min_tokens <= at and marked


def positions(settings: Settings, seat: SlotLease, prompt: Prompt) -> Iterator[int]:
    """Where checkpoints beyond the device pay, in no order and before they are moved down to whole blocks.

    `full`: where the next turn comes back to; every `interval` tokens; and for new sessions of the same agent
    at the last boundary up to `cold_max`, unless this one was restored, or the boundary opens the answer. `auto` and
    `fixed`: where they stop, and there only: with nothing shared, nobody has come back yet.
    """
    job = prompt.job
    if not settings.store or job.scope.kind == "off":
        return
    if job.scope.kind != "full":
        yield min(reach(prompt, len(prompt.tokens))[0], prompt.target)
        return
    yield turning(settings, prompt)
    if settings.interval:
        yield next_multiple(
            settings.interval, max(whole_blocks(settings, seat.valid) + settings.block_size, settings.min_tokens)
        )
    if not seat.restored:
        limit = min(settings.cold_max, alike(job.prompt, prompt.tokens) if rewritten(prompt) else settings.cold_max)
        yield aligned(job.boundaries[:-1], limit)


def turning(settings: Settings, prompt: Prompt) -> int:
    """Where the next turn comes back to: the end of prefill, or the boundary right before it that opens the answer.

    Templates may write what follows that boundary anew: they leave earlier reasoning out.
    """
    opens = aligned(opened(prompt), prompt.target)
    return opens if opens and prompt.target - opens < settings.block_size else prompt.target


def opened(prompt: Prompt) -> Tokens:
    """Boundaries, where they are in what is served; none of a prompt that was compressed as a whole."""
    if not rewritten(prompt):
        return prompt.job.boundaries
    if not freezes(prompt.job) or prompt.compression is None:
        return ()
    shift, found = 0, list[int]()
    spans = iter(prompt.compression.kept)
    start, stop = next(spans, (0, 0))
    for at in prompt.job.boundaries:
        while stop < at and (span := next(spans, None)) is not None:
            shift, (start, stop) = shift + stop - start, span
        if start < at <= stop:
            found.append(shift + at - start)
    return tuple(found)


def next_multiple(step: int, least: int) -> int:
    return -(-least // step) * step
