"""What a slot serves: the tokens that its rows stand for, how many rows are valid, and how the next token is picked."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from adapters.device.sampling import Sampler
from effects.ids import RequestId, Span


@define(eq=False)
class SlotState:
    """Made anew by every OpenSlot, so nothing of an earlier request can stay behind.

    tokens: the prompt, then the answer. valid: rows `[0, valid)` are those of `tokens[:valid]`; rows past it are
    garbage, but for those that were loaded, and taking rows back is lowering it. loaded: rows that came from a store,
    perhaps while those before them are still computed. Read and changed on the lane only.
    """

    request: RequestId
    tokens: list[int]
    valid: int
    sampler: Sampler
    loaded: Span = (0, 0)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Do the first rows stand for exactly these?"""
        count = len(tokens)
        return self.valid >= count and self.tokens[:count] == list(tokens)

    def load(self, start: int, stop: int) -> None:
        """Rows `[start, stop)` are in place: they count as soon as all rows before them do."""
        first, last = self.loaded
        self.loaded = (first, stop) if first < last == start else (start, stop)
        self.advance(self.valid)

    def advance(self, valid: int) -> None:
        """Rows up to `valid` are computed; loaded ones that follow count too."""
        start, stop = self.loaded
        self.valid = stop if start <= valid < stop else valid

    def commit(self, picked: Sequence[int]) -> None:
        """A round fed the last token and kept `picked`: all of them but the last have rows now, as has what was fed."""
        self.valid += len(picked)
        self.tokens += picked
        self.sampler.append(picked)
