"""Decides whether a run is published in a shared store. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

# Why a run is not published; labels in /metrics.
DropReason: TypeAlias = Literal["", "outage", "queue_full", "no_room"]
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


def find_drop_reason(limits: SharedLimits, size: int, waiting: int, held: int, *, usable: bool) -> DropReason:
    """Return why a run of `size` bytes is not published; empty if it is.

    waiting: bytes that wait already. held: bytes that are known to be in the store. usable: the store can be reached.
    """
    if not usable:
        return "outage"
    if waiting + size > limits.max_waiting:
        return "queue_full"
    if limits.budget and held + size > limits.budget * OVERSHOOT_PERCENT // 100:
        return "no_room"
    return ""
