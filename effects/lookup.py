"""Lookups in the block store: is a prefix of this prompt kept in one of its tiers (host memory, disk, shared)?"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import LeaseId, Side, StoreFailed, Tier, Tokens


@frozen
class PrefixFound:
    """Rows `[0, length)` are in the store, and stay there until `lease` is released.

    Where the model has positional state, a request can only continue from a checkpoint of that state. The last
    checkpoint is at `length`.
    """

    lease: LeaseId
    length: int  # tokens, a multiple of the block size
    tier: Tier  # that most of these rows come from; some may come from other tiers, but times are those of this one
    shared: int = 0  # tokens in common with the most similar recent prompt, if they were compared
    checkpoints: tuple[int, ...] = ()  # ascending, a few of the last ones; all lie behind the `beyond` that was asked


@frozen
class PrefixMissed:
    """The store has no rows beyond those that are on the device."""

    reason: str  # machine-readable: empty_store, diverged_at:N, too_short ...
    shared: int = 0  # as in `PrefixFound`
    length: int = 0  # tokens that the store has all the same; no more than are on the device


@frozen
class FindPrefix:
    """Look for more of a prompt than the device has."""

    outcomes: ClassVar = (PrefixFound, PrefixMissed, StoreFailed)
    side: ClassVar = Side.STORE
    prompt: Tokens
    beyond: int  # tokens that are on the device already, with the state behind them
    prompts_to_compare: int = 0  # the last so many prompts; this one becomes one of them; 0: neither
    rows: int = 0  # tokens whose rows are on the device, though the positional state behind them may not be
    salt: str = ""  # only rows of the same salt are found


@frozen
class ReleasePrefix:
    """Release a lease from which no rows will be restored."""

    outcomes: ClassVar = ()
    lease: LeaseId
