"""What a slot serves: the tokens that its rows stand for, how many rows are valid, and how the next token is picked."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from adapters.device.sampling import Sampler
from effects.ids import RequestId


@define(eq=False)
class SlotState:
    """Made anew by every OpenSlot, so nothing of an earlier request can stay behind.

    tokens: the prompt, then the answer. valid: rows `[0, valid)` are those of `tokens[:valid]`; rows past it are
    garbage, and taking rows back is lowering it. Read and changed on the lane only.
    """

    request: RequestId
    tokens: list[int]
    valid: int
    sampler: Sampler

    def holds(self, tokens: Sequence[int]) -> bool:
        """Do the first rows stand for exactly these?"""
        count = len(tokens)
        return self.valid >= count and self.tokens[:count] == list(tokens)

    def commit(self, picked: Sequence[int]) -> None:
        """A round fed the last token and kept `picked`: all of them but the last have rows now, as has what was fed."""
        self.valid += len(picked)
        self.tokens += picked
        self.sampler.append(picked)
