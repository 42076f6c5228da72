"""The block store: is a prefix of this prompt kept in host memory or on disk?"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import LeaseId, Side, StoreFailed, Tier, Tokens


@frozen
class PrefixFound:
    """Rows `[0, length)` are kept and will stay until `lease` is released.

    Where the model has positional state, it can be gone on from its checkpoints only: the last one is at `length`.
    """

    lease: LeaseId
    length: int  # tokens, a multiple of the block size
    tier: Tier
    shared: int = 0  # tokens that the prompt begins with as the likest of the recent prompts does, when it was asked
    checkpoints: tuple[int, ...] = ()  # ascending, a few of the last ones; all beyond what was asked


@frozen
class PrefixMissed:
    reason: str  # machine-readable: empty_store, diverged_at:N, too_short ...
    shared: int = 0
    length: int = 0  # tokens that are kept all the same: no more than were known to be on the device


@frozen
class FindPrefix:
    """Look for more than the `beyond` tokens that are on the device already.

    rows: of a model with positional state, rows of the prompt that are there, though the state behind them is not.
    """

    outcomes: ClassVar = (PrefixFound, PrefixMissed, StoreFailed)
    side: ClassVar = Side.STORE
    prompt: Tokens
    beyond: int
    window: int = 0  # compare with so many recent prompts (the prompt then joins them); 0: neither
    rows: int = 0
    salt: str = ""  # nothing is found of prompts of another


@frozen
class ReleasePrefix:
    """Give a lease back that nothing will be restored from."""

    outcomes: ClassVar = ()
    lease: LeaseId
