"""Decides whether a run is published in a shared store. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

# Why a run is not queued; names of counters end so.
DropReason: TypeAlias = Literal["", "outage", "queue_full"]
# Servers see what others wrote some seconds later, so they exceed the budget together. Collection brings it back.
OVERSHOOT_PERCENT = 110


@frozen
class SharedLimits:
    """Limits of what one server writes and keeps.

    max_waiting: bytes of rows, and of files made of them, that wait to be written. budget: bytes in the store for one
    identity, 0 for no limit. max_age_s: runs that were not used for longer are removed.
    """

    max_waiting: int
    budget: int
    max_age_s: float


def find_drop_reason(limits: SharedLimits, size: int, waiting: int, *, usable: bool) -> DropReason:
    """Return why a run of `size` bytes is not queued; empty if it is.

    waiting: bytes that wait already. usable: the store can be reached.
    """
    if not usable:
        return "outage"
    return "queue_full" if waiting + size > limits.max_waiting else ""


def has_room(limits: SharedLimits, size: int, held: int) -> bool:
    """Say whether a run of `size` bytes may be written. held: bytes that are known to be in the store."""
    return not limits.budget or held + size <= limits.budget * OVERSHOOT_PERCENT // 100
