"""The batch of a draft whose rows each continue a hidden state that came before (`chained_draft.py`)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.drafts.kept_states import KEPT_STATES, find_kept_row, list_target_rows
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import BlockBatch

FIRST_KEPT = 1  # the first row of `ChainedDraft._hidden` that keeps a state; the one before it holds zeros
# Where a row's hidden state comes from: the target's rows of the same step, the kept state of the row before, or the
# draft's own forward for the proposal before.
StateSource: TypeAlias = Literal["step", "kept", "draft"]


@define(eq=False)
class ChainedBatch(BlockBatch):
    """A batch with two more views. Their values are row numbers of `ChainedDraft._hidden`.

    sources  the row with the hidden state that this row continues; 0, whose values are zeros, if there is none.
    kept_at  the row that keeps this row's own hidden state; the row behind those of all slots if it is not kept.

    source: where these states come from. Set it before `load`.
    """

    slots_held: int
    source: StateSource = field(init=False, default="step")
    sources: Tensor = field(init=False)
    kept_at: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._padding = (*self._padding, 0, self.step_rows - 1)
        super().__attrs_post_init__()
        self.sources, self.kept_at = self.table[6:].unbind(0)

    @property
    def step_rows(self) -> int:
        """The first row with hidden states of the step's own rows."""
        return FIRST_KEPT + self.slots_held * KEPT_STATES + 1

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        sources = list[int]()
        targets = list[int]()
        for segment in step.segments:
            sources += self._find_sources(segment, self.step_rows + len(sources))
            targets += list_target_rows(FIRST_KEPT, segment, self.step_rows - 1)
        return *super()._columns(step), sources, targets

    def _find_sources(self, segment: Segment, row: int) -> list[int]:
        """Return the sources of a segment's rows. row: of the step, its first one."""
        if self.source == "draft":
            return list(range(row, row + segment.count))
        kept = find_kept_row(FIRST_KEPT, segment.slot, segment.start - 1)
        if self.source == "kept":
            return [kept] * segment.count
        before = [row + index - 1 if (segment.start + index) % KEPT_STATES else 0 for index in range(segment.count)]
        if segment.start % KEPT_STATES:
            before[0] = kept
        return before

    def advance(self, tokens: Tensor) -> None:
        """Move each real row to the next position, where it feeds this token and continues the draft's own state.

        tokens: int64 `[rows]` on the batch's device. Only the device changes its columns, so the host does not wait.
        """
        rows = len(tokens)
        self.tokens[:rows].copy_(tokens)
        # The columns of positions, lengths and starts are neighbours.
        self.table[2:5, :rows] += 1
        if self.source != "draft":
            first = self.step_rows
            self.sources[:rows].copy_(torch.arange(first, first + rows, device=self.device))
            self.source = "draft"
        self.segments = tuple(Segment(segment.slot, segment.start + 1, segment.count) for segment in self.segments)
