"""What is worth keeping beyond the device: how many rows of a sequence, and where checkpoints go. Gives reasons."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from attrs import evolve

from effects.ids import Tokens
from effects.job import Report
from effects.scope import Selection
from states.life import Hold, alike, kept, whole_blocks


def report(hold: Hold) -> Report:
    """What the client is told at the end."""
    return evolve(hold.report, cache=select(hold))


def select(hold: Hold) -> Selection:
    """How many rows are kept: up to where the scope says, as far as they are valid, in whole blocks.

    Too few of them are not worth it: 0.
    """
    settings, name = hold.settings, str(hold.job.scope)
    if not settings.store:
        return Selection(name, "no_store")
    boundary, reason = reach(hold)
    length = min(boundary, kept(hold))
    rows = whole_blocks(settings, length) if length >= settings.min_tokens else 0
    if boundary and not rows:
        reason = "too_short" if length else "no_rows"
    return Selection(name, reason, hold.shared, boundary, rows)


def reach(hold: Hold) -> tuple[int, str]:
    """How many tokens the scope takes, were they all valid and enough; and why so many."""
    scope = hold.job.scope
    if scope.kind == "off":
        return 0, "scope_off"
    if scope.kind == "full":
        return len(hold.prompt) + len(hold.answer), "whole"
    if rewritten(hold):
        limit = hold.shared if scope.kind == "auto" else scope.count
        return aligned(hold.job.boundaries, min(limit, alike(hold.job.prompt, hold.prompt))), "rewritten"
    if scope.kind == "auto":
        return shared(hold)
    return (scope.count, "fixed") if scope.count <= len(hold.prompt) else (0, "longer_than_prompt")


def shared(hold: Hold) -> tuple[int, str]:
    """`auto`: what the likest recent prompt begins with too, down to where a message opens, if any does."""
    if hold.shared == 0:
        return 0, "nothing_shared"
    if not hold.job.boundaries:
        return hold.shared, "shared"
    boundary = aligned(hold.job.boundaries, hold.shared)
    return boundary, "boundary" if boundary else "no_boundary"


def rewritten(hold: Hold) -> bool:
    """Is something else served than was sent? Then only what both begin with can be met again, and in a dialogue's
    first messages only: there, a boundary is one of both.
    """
    return hold.prompt is not hold.job.prompt and hold.prompt != hold.job.prompt


def aligned(boundaries: Tokens, limit: int) -> int:
    """The last boundary up to `limit`, or 0."""
    before = bisect_right(boundaries, limit)
    return boundaries[before - 1] if before else 0


def checkpoint(hold: Hold) -> int | None:
    """The next position after the valid rows at which prefill stops to keep the positional state; None: none."""
    settings = hold.settings
    if not (settings.stateful and settings.store) or hold.job.scope.kind == "off":
        return None
    worth = (place for place in positions(hold) if place >= settings.min_tokens)
    last = whole_blocks(settings, hold.target)
    return min((at for place in worth if hold.valid < (at := whole_blocks(settings, place)) <= last), default=None)


def positions(hold: Hold) -> Iterator[int]:
    """Where checkpoints pay, in no order and before they are moved down to whole blocks.

    `full`: at the end of prefill, for the next turn; every `interval` tokens; and for new sessions of the same agent
    at the last boundary up to `cold_max`, unless this one was restored, or the boundary opens the answer. `auto` and
    `fixed`: where they stop, and there only: with nothing shared, nobody has come back yet.
    """
    scope, settings = hold.job.scope, hold.settings
    if scope.kind != "full":
        yield min(reach(hold)[0], hold.target)
        return
    yield hold.target
    if settings.interval:
        yield next_multiple(
            settings.interval, max(whole_blocks(settings, hold.valid) + settings.block_size, settings.min_tokens)
        )
    if not hold.restored:
        limit = min(settings.cold_max, alike(hold.job.prompt, hold.prompt) if rewritten(hold) else settings.cold_max)
        yield aligned(hold.job.boundaries[:-1], limit)


def next_multiple(step: int, least: int) -> int:
    return -(-least // step) * step
