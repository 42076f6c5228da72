"""Whole decode steps of one slot in a single call, as interfaces: forward, draft, verification and draft context.

A `DecodePass` is everything of one model for steps of one bucket: its layers, its head and its static tensors. A
`DraftPass` is the same of a draft, with the steps that compute its context rows. A `DecodeRound` joins a target's pass
with a draft's, or runs the target alone, and picks the tokens as well. `Kernels.build_pass` and
`Kernels.build_draft_pass` make them where the device has such code; elsewhere they return None, and a step is made of
separate calls with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adapters.models.kernels.host_addresses import HostAddresses
from adapters.models.kernels.step import Forward
from effects.ids import Tokens
from effects.job import Sampling

MOST_ROWS = 64  # of a step that one call carries out (MOST_FED of rounds.h)


class RoundOutcome(NamedTuple):
    """The outcome of a decode step. No tokens: its logits were not finite.

    proposed, accepted: how many tokens were proposed, and how many of them the target agreed with. followed:
    whether the draft, if there is one, has computed its context rows for these tokens.
    """

    tokens: Tokens
    proposed: int
    accepted: int
    followed: bool = True


class DecodeRound(Protocol):
    """Decode steps of as many rows as the target's pass has.

    `describe` says how tokens are picked, before the first step and whenever another request comes.
    """

    @property
    def rows(self) -> int: ...

    def describe(self, sampling: Sampling, guesses: Sequence[Sampling], stops: Sequence[int]) -> None:
        """Set how the target picks, how the draft picks each of its proposals, and which tokens end the answer.

        guesses: one for each row. stops: ascending.
        """
        ...

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Set which of the target's tensors, each `[R, D]`, late rows are copied from. Raises ValueError."""
        ...

    def copy_late_row(self, targets: HostAddresses | None, row: int = 0) -> None:
        """Set where the next step's row is copied to, for a draft that follows it later: row `row` of each target."""
        ...

    def give(self, copies: Tokens, masks: Sequence[NDArray[np.uint8]]) -> None:
        """Set what the next step proposes instead of a draft, and which tokens may follow each of its rows.

        masks: one for each row that is fed, as `sampling_interface.TokenMask`; empty: all tokens may follow. Raises
        ValueError for more than it has rows.
        """
        ...

    def run(self, slot: int, position: int, first: int, token: int, count: int) -> RoundOutcome:
        """Feed the token at `position` of the slot and up to `count` proposals behind it.

        first: where the draft's context begins. Raises IndexError for what the caches or the embedding do not have,
        MemoryError where there is none, ValueError where the draft's weights have gone. Nothing has happened then.
        """
        ...


class DraftPass(Protocol):
    """A draft's part of a round. Its owner drops it with its weights; a round refers to it weakly."""

    @property
    def rows(self) -> int:
        """Rows of a block: one more than the proposals that it makes at most."""
        ...


class DecodePass(Protocol):
    """Layers and the head behind them, for steps of one bucket, on static tensors."""

    @property
    def rows(self) -> int: ...

    @property
    def forward(self) -> Forward: ...

    @property
    def logits(self) -> Tensor:
        """Float32 `[R, V]`."""
        ...

    def build_round(self, draft: ref[DraftPass] | None) -> DecodeRound:
        """Return decode steps on this pass. Raises ValueError for a draft that does not go with it."""
        ...
