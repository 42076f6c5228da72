"""The context of a draft: its own rows for the rows of the target, computed when proposals are wanted.

A draft that proposes needs rows of its own for all rows of the target, made from the target's hidden states. To compute
them is called to *follow* the target's rows. To follow after each step would cost a forward of the draft even when
nothing is proposed. So the hidden states are copied to a backlog first, where the rows are *deferred*. When a slot
wants proposals, the draft follows the deferred rows of all slots that want some in one forward.

A backlog holds a bounded number of rows per slot. When it is full, the draft follows them at once. There are two
exceptions, in which the oldest rows are dropped, and the draft has a gap in its context:

* A batch decodes together without proposals. There a forward of the draft would cost every request time, and bring none
  of them anything.
* The launch goes on without proposals for as many steps as rows are dropped. That many plain steps lie only between two
  trials of a draft that does not pay, and the next trial follows what is left.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.deferred_rows import DeferredBatch, DeferredRowBuffer, DeferredRows
from adapters.device.speculation.proposer import BacklogRow, DraftModel, Proposer
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Segment, Step

log = logging.getLogger("rekindle.device")

# The most rows of a slot in its backlog: as many as the longest rest of a request has decode steps. They take 0.8 MB a
# slot for the demo, and 10.5 MB for the five auxiliary layers of an 8B model.
BACKLOG = 256
FORGOTTEN = 4  # one part in this many of a backlog is dropped at a time


D = TypeVar("D", bound=DraftModel)


@define(eq=False)
class DraftContext(Proposer, Generic[D]):
    """Follows the target for one draft. Used on the lane. buckets: the row counts that forwards run with, ascending.

    A draft that is not loaded, or that finds no memory for its buffers, follows nothing: its context has a gap then.
    """

    draft: D
    buckets: Sequence[int]
    _deferred: dict[int, list[DeferredRows]] = field(init=False, factory=dict)  # by slot
    _deferred_counts: Counter[int] = field(init=False, factory=Counter)  # by slot, the rows of its backlog
    # The most rows of a slot that are deferred. One forward can follow this many, so catching up takes two at most.
    backlog: int = field(init=False)
    deferred_buffer: DeferredRowBuffer = field(init=False)
    # The rows that a fused step may add to, which are not counted yet.
    _open_run: DeferredRows | None = field(init=False, default=None)
    # The rows that the next step of the same requests may add to, which are not counted yet.
    _open_batch: DeferredBatch | None = field(init=False, default=None)
    # Did the last deferred step decode several requests without proposals?
    _decodes_unproposed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.deferred_buffer = DeferredRowBuffer(self.draft.aux_layers)
        self.backlog = min(BACKLOG, max(self.buckets))

    def follow(
        self,
        step: Step,
        aux_hidden_states: Mapping[int, Tensor],
        kept: Sequence[Kept],
        states: Sequence[SlotState],
        plain_steps: int = 0,
    ) -> None:
        """Defer the rows that stay, or follow them at once if proposals were rejected or if they are too many."""
        if self.draft.weights_state != "loaded" or not any(kept):
            return
        counts = [segment.count for segment in step.segments]
        if (step.rows_only or sum(counts) == len(kept)) and max(counts) <= self.backlog:
            self._defer(step.segments, counts, aux_hidden_states, states, plain_steps)
        else:
            shorter, staying = without_rejected_rows(step, kept, self.buckets)
            stay = select_rows(
                {layer: aux_hidden_states[layer] for layer in self.draft.aux_layers}, staying, shorter.bucket
            )
            self._extend(shorter, stay, [state for state, keep in zip(states, kept, strict=True) if keep])

    def _defer(
        self,
        segments: Sequence[Segment],
        counts: Sequence[int],
        aux_hidden_states: Mapping[int, Tensor],
        states: Sequence[SlotState],
        plain_steps: int,
    ) -> None:
        """Put rows of a prompt, and the rows of decode steps without proposals, into the backlogs of their slots."""
        stride = len(counts) if max(counts) == 1 else 1
        if self._open_batch is None or stride == 1:
            self._count()
        copies, first = self.deferred_buffer.keep(aux_hidden_states, sum(counts))
        if self._open_batch is not None and self._open_batch.append_step(segments, states, copies, first):
            return
        self._count()
        was_unproposed = self._decodes_unproposed
        self._decodes_unproposed = counts.count(1) > 1
        forgotten = self.backlog // FORGOTTEN
        drops_oldest = was_unproposed or self._decodes_unproposed or plain_steps >= forgotten
        for segment, count, state in zip(segments, counts, states, strict=True):
            slot = segment.slot
            late = self._deferred.get(slot)
            if late is None:
                late = list[DeferredRows]()
                self._deferred[slot] = late
            elif self._deferred_counts[slot] + count > self.backlog:
                if drops_oldest:
                    self._forget(slot, max(count, forgotten))
                else:
                    self.catch_up(slot)
                    late = list[DeferredRows]()
                    self._deferred[slot] = late
            if not (late and late[-1].append_rows(state, segment, copies, first, stride)):
                late.append(DeferredRows(state, slot, segment.start, count, copies, first, stride))
            self._deferred_counts[slot] += count
            first += count
            late[-1].counted = late[-1].count
        if len(segments) == 1:
            slot = segments[0].slot
            last = self._deferred[slot][-1]
            self._open_run = last
            last.room = last.count + min(self.deferred_buffer.unused_rows, self.backlog - self._deferred_counts[slot])
        elif stride > 1:
            spans = [self._deferred[segment.slot][-1] for segment in segments]
            room = self.backlog - max(self._deferred_counts[span.slot] for span in spans)
            starts = [segment.start + 1 for segment in segments]
            self._open_batch = DeferredBatch(spans, states, starts, first, room)

    def find_next_row(self, slot: int, state: SlotState) -> BacklogRow | None:
        """Return the destination of the slot's next row, if that is the row behind the last one that was deferred.

        The draft is loaded then: one that is sent away follows everything before that.
        """
        last = self._open_run
        if last is None or last.count >= last.room or last.state is not state or last.slot != slot:
            return None
        if last.start + last.count != state.valid:
            return None
        return BacklogRow(last, self.draft.aux_layers, self.deferred_buffer.addresses)

    def _count(self) -> None:
        """Count the rows that fused steps and steps of a batch have added, and let them add no more there."""
        last = self._open_run
        batch = self._open_batch
        self._open_run = None
        self._open_batch = None
        if last is not None:
            self.deferred_buffer.mark_used(last.count - last.counted)
            self._count_rows(last)
        if batch is not None:
            for span in batch.spans:
                self._count_rows(span)

    def _count_rows(self, span: DeferredRows) -> None:
        self._deferred_counts[span.slot] += span.count - span.counted
        span.counted = span.count

    def _forget(self, slot: int, count: int) -> None:
        """Drop the oldest rows of a backlog. The draft's context has a gap there."""
        late = self._deferred[slot]
        while count and late:
            gone = min(count, late[0].count)
            self._deferred_counts[slot] -= gone
            count -= gone
            if late[0].drop_first_rows(gone):
                late.pop(0)

    def catch_up(self, *slots: int) -> None:
        """Follow the deferred rows of these slots, in as few forwards as have room for them."""
        runs = [run for slot in slots for run in split_runs(self._pop_deferred(slot))]
        while runs:
            together = list[list[DeferredRows]]()
            rows = 0
            while runs and rows + count_rows(runs[0]) <= max(self.buckets) and has_other_slot(runs[0], together):
                together.append(runs.pop(0))
                rows += count_rows(together[-1])
            self._follow_deferred(together, rows)

    def _pop_deferred(self, slot: int) -> Sequence[DeferredRows]:
        self._count()
        self._deferred_counts.pop(slot, None)
        return self._deferred.pop(slot, ())

    def _follow_deferred(self, runs: Sequence[Sequence[DeferredRows]], rows: int) -> None:
        bucket = next(bucket for bucket in self.buckets if bucket >= rows)
        parts = [late for run in runs for late in run]
        joined = {
            layer: torch.nn.functional.pad(
                torch.cat([late.select_rows(layer) for late in parts]),
                (0, 0, 0, bucket - rows),
            )
            for layer in self.draft.aux_layers
        }
        segments = tuple(Segment(run[0].slot, run[0].start, count_rows(run)) for run in runs)
        self._extend(Step(segments, bucket), joined, [run[0].state for run in runs])

    def _extend(self, step: Step, aux_hidden_states: Mapping[int, Tensor], states: Sequence[SlotState]) -> None:
        tokens: list[int] = []
        for segment, state in zip(step.segments, states, strict=True):
            tokens += state.tokens[segment.start : segment.start + segment.count]
        try:
            self.draft.extend(step, torch.from_numpy(np.array(tokens, np.int64)), aux_hidden_states)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("the draft missed a step and proposes nothing for this request: %s", error)
            return
        for segment, state in zip(step.segments, states, strict=True):
            state.add_draft_rows(segment.start, segment.start + segment.count)

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        """Copy the draft's rows with those of the target, and drop the backlog of the slot that was opened."""
        self._pop_deferred(target)
        if source != target:
            for start, stop in state.draft_spans:
                self.draft.copy_rows(source, target, start, stop)


def split_runs(late: Sequence[DeferredRows]) -> list[list[DeferredRows]]:
    """Return the rows as runs that follow each other without a gap."""
    runs = list[list[DeferredRows]]()
    for one in late:
        if runs and runs[-1][-1].start + runs[-1][-1].count == one.start:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def count_rows(run: Sequence[DeferredRows]) -> int:
    """Return the number of rows of a run."""
    return sum(late.count for late in run)


def has_other_slot(run: Sequence[DeferredRows], others: Sequence[Sequence[DeferredRows]]) -> bool:
    """Is the slot of this run in none of the others? A slot can be in a forward once only."""
    return all(run[0].slot != other[0].slot for other in others)


def without_rejected_rows(step: Step, kept: Sequence[Kept], buckets: Sequence[int]) -> tuple[Step, list[int]]:
    """Return the step of the rows that stay, at the smallest bucket, and the numbers of these rows in `step`."""
    rows: list[int] = []
    segments: list[Segment] = []
    first = 0
    for part, keep in zip(step.parts, kept, strict=True):
        path = range(keep) if isinstance(keep, int) else keep
        rows += [first + row for row in path]
        if path:
            segments.append(Segment(part[0].slot, part[0].start, len(path)))
        first += sum(segment.count for segment in part)
    bucket = next(bucket for bucket in buckets if bucket >= len(rows))
    return Step(tuple(segments), bucket), rows


def select_rows(hidden: Mapping[int, Tensor], rows: Sequence[int], bucket: int) -> Mapping[int, Tensor]:
    """Return these ascending rows of each layer's `[R, D]`, padded to `[bucket, D]` with arbitrary rows."""
    is_first_rows = not rows or rows[-1] < len(rows)
    if is_first_rows:
        return {layer: states if states.shape[0] == bucket else states[:bucket] for layer, states in hidden.items()}
    index = torch.tensor([*rows, *[0] * (bucket - len(rows))])
    return {
        layer: states.index_select(0, index.to(states.device, non_blocking=True)) for layer, states in hidden.items()
    }
