"""Decisions that are nobody's state: pure functions, each with a truth table in the tests, each giving its reason."""

from __future__ import annotations

from attrs import frozen

from states.life import Hold, grained, kept
from states.settings import Settings


@frozen
class Decision:
    go: bool
    reason: str  # machine-readable


def shorten(hold: Hold) -> Decision:
    """May anything but the prompt as it came be served: a new compression, or a remembered one?"""
    if hold.settings.compress_threshold == 0:
        return Decision(False, "off")
    if not hold.job.compress:
        return Decision(False, "declined")
    if hold.compressed:
        return Decision(False, "already_tried")
    return Decision(True, "allowed")


def compress(hold: Hold, missing: int) -> Decision:
    """The PFlash gate: looks at the tokens that are still missing, so a continuation is never compressed."""
    allowed = shorten(hold)
    if not allowed.go:
        return allowed
    if missing < hold.settings.compress_threshold:
        return Decision(False, "below_threshold")
    return Decision(True, "long")


def lookup(hold: Hold) -> Decision:
    """Is there anything to gain from asking the stores?"""
    if not hold.settings.store:
        return Decision(False, "no_store")
    if hold.job.scope.kind == "off":
        return Decision(False, "scope_off")
    if grained(hold.settings, hold.target) <= hold.valid:
        return Decision(False, "on_device")
    return Decision(True, "ask")


def speculate(hold: Hold) -> Decision:
    """Is the draft worth being brought in for this request?"""
    if hold.settings.block == 0:
        return Decision(False, "no_draft")
    if not hold.job.speculate:
        return Decision(False, "declined")
    if hold.job.max_tokens == 1:
        return Decision(False, "one_token")
    return Decision(True, "draft")


def snapshot(hold: Hold) -> Decision:
    """Are there rows that the stores do not have?"""
    if not hold.settings.store:
        return Decision(False, "no_store")
    if hold.job.scope.kind == "off":
        return Decision(False, "scope_off")
    if grained(hold.settings, kept(hold)) <= hold.restored:
        return Decision(False, "nothing_new")
    return Decision(True, "new_rows")


def front(settings: Settings, start: int, stop: int, load_ns: int) -> int:
    """The planner's one number m: compute `[start, m)` while `[m, stop)` is loaded, both to end at once.

    Rates are times per token; an unknown one means that restoring is trusted. m = start is pure restore, m = stop pure
    recompute.
    """
    if load_ns == 0 or settings.prefill_ns == 0:
        return start
    even = start + grained(settings, (stop - start) * load_ns // (load_ns + settings.prefill_ns))
    return min(
        even,
        min(even + settings.grain, stop),
        key=lambda m: max((m - start) * settings.prefill_ns, (stop - m) * load_ns),
    )
