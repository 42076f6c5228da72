"""The acceptance profile of a draft: how often its proposals are right, by their position behind the last token.

`rekindle bench speculation --log LOG --json` measures one for each kind of draft. `rekindle simulate --acceptance`
reads that output, and draws from a profile how many tokens each simulated decode step gives.

A mean of accepted tokens says too little: the steps of a request differ, requests of one step end at different times,
and the mean at another width is unknown. A profile knows all of these.
"""

from __future__ import annotations

import json
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from attrs import frozen

from engine.settings.user_error import UserError

MOST_FILE = 1 << 20  # bytes
MOST_WIDTH = 31  # proposals of a decode step
FORM = "accepted: the output of `rekindle bench speculation --json`"


@frozen
class AcceptanceProfile:
    """The shares of decode steps in which proposals of one kind of draft are right.

    proposing: the share of decode steps in which anything is proposed. right: for each position, how often the proposal
    there is right if all before it are.
    """

    draft: str
    proposing: float
    right: tuple[float, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse shares that cannot be."""
        if len(self.right) > MOST_WIDTH or not all(0 <= share <= 1 for share in (self.proposing, *self.right)):
            raise ValueError(f"a profile that cannot be: {self}")

    @property
    def survival(self) -> tuple[float, ...]:
        """For each position, the share of all decode steps in which the proposals up to there are right."""
        return tuple(self.proposing * share for share in accumulate(self.right, mul))

    @property
    def tokens_per_step(self) -> float:
        """The tokens that a decode step gives on average."""
        return 1 + sum(self.survival)

    def draw_tokens(self, request: int, position: int) -> int:
        """Return how many tokens the decode step at this position of a request gives.

        The same request gets the same number at the same position in every simulation, so scopes can be compared.
        """
        drawn = mix_bits(mix_bits(request) ^ position) / (1 << 64)
        return 1 + sum(drawn < share for share in self.survival)


def mix_bits(number: int) -> int:
    """Return 64 bits that depend on every bit of a number: the finaliser of SplitMix64."""
    number = (number + 0x9E3779B97F4A7C15) % (1 << 64)
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    number = (number ^ number >> 27) * 0x94D049BB133111EB % (1 << 64)
    return number ^ number >> 31


def read_profile(path: Path, draft: str, width: int) -> AcceptanceProfile:
    """Return the profile of one kind of draft from a file. Raises UserError or OSError.

    draft: its name there, or the first one if it is empty. width: proposals of a step at most; 0: as many as were
    measured.
    """
    if path.stat().st_size > MOST_FILE:
        raise UserError(f"--acceptance {path}: larger than {MOST_FILE} bytes")
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        profiles = [parse_profile(measured) for measured in listed]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"--acceptance {path}: {type(error).__name__}: {error}; {FORM}") from error
    chosen = [profile for profile in profiles if draft in ("", profile.draft)]
    if not chosen:
        names = ", ".join(profile.draft for profile in profiles) or "no draft"
        raise UserError(f"--acceptance {path}: there is no {draft or 'draft'!r}; it has {names}")
    profile = chosen[0]
    return AcceptanceProfile(profile.draft, profile.proposing, profile.right[: width or MOST_WIDTH])


def parse_profile(measured: Any) -> AcceptanceProfile:
    """Return the profile of one entry of that output. Raises ValueError, KeyError, TypeError or OverflowError."""
    right = tuple(float(share) for share in measured["right_by_position"])
    return AcceptanceProfile(str(measured["draft"]), float(measured["proposing_share"]), right)
