"""What is worth keeping beyond the device: how many rows of a sequence, and where checkpoints go. Gives reasons."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from effects.ids import Tokens
from effects.scope import Selection
from states.life import Prompt, Remains, Seat, alike, kept, whole_blocks
from states.settings import Settings


def select(settings: Settings, left: Remains) -> Selection:
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
        limit = prompt.shared if scope.kind == "auto" else scope.count
        return aligned(job.boundaries, min(limit, alike(job.prompt, prompt.tokens))), "rewritten"
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
    """Is something else served than was sent? Then only what both begin with can be met again, and in a dialogue's
    first messages only: there, a boundary is one of both.
    """
    return prompt.tokens is not prompt.job.prompt and prompt.tokens != prompt.job.prompt


def aligned(boundaries: Tokens, limit: int) -> int:
    """The last boundary up to `limit`, or 0."""
    before = bisect_right(boundaries, limit)
    return boundaries[before - 1] if before else 0


def checkpoint(settings: Settings, seat: Seat, prompt: Prompt) -> int | None:
    """The next position after the valid rows at which prefill stops to keep the positional state; None: none."""
    if not (settings.stateful and settings.store) or prompt.job.scope.kind == "off":
        return None
    worth = (place for place in positions(settings, seat, prompt) if place >= settings.min_tokens)
    last = whole_blocks(settings, prompt.target)
    return min((at for place in worth if seat.valid < (at := whole_blocks(settings, place)) <= last), default=None)


def positions(settings: Settings, seat: Seat, prompt: Prompt) -> Iterator[int]:
    """Where checkpoints pay, in no order and before they are moved down to whole blocks.

    `full`: at the end of prefill, for the next turn; every `interval` tokens; and for new sessions of the same agent
    at the last boundary up to `cold_max`, unless this one was restored, or the boundary opens the answer. `auto` and
    `fixed`: where they stop, and there only: with nothing shared, nobody has come back yet.
    """
    job = prompt.job
    if job.scope.kind != "full":
        yield min(reach(prompt, len(prompt.tokens))[0], prompt.target)
        return
    yield prompt.target
    if settings.interval:
        yield next_multiple(
            settings.interval, max(whole_blocks(settings, seat.valid) + settings.block_size, settings.min_tokens)
        )
    if not seat.restored:
        limit = min(settings.cold_max, alike(job.prompt, prompt.tokens) if rewritten(prompt) else settings.cold_max)
        yield aligned(job.boundaries[:-1], limit)


def next_multiple(step: int, least: int) -> int:
    return -(-least // step) * step
