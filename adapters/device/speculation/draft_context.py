"""A draft's context: its own rows for those of the target, followed when somebody wants proposals.

Those of all slots are followed at once: a prompt that ends with it, and what was decoded one by one meanwhile, cost
nothing before. What does not fit a backlog is followed without that, or forgotten where several decode together and
nobody proposes: then the draft would cost every member a share of what it cannot give back.
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

from adapters.device.lane.out_of_memory import ran_out_of_memory
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.host_copy import move
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.host_addresses import HostAddresses, list_addresses
from adapters.models.kernels.step import Segment, Step

log = logging.getLogger("rekindle.device")

# Rows of a slot that the draft has not followed yet, at most: as many as the longest rest of a request has decode
# steps. Of the demo they hold 0.8 MB a slot, of an 8B model's five auxiliary layers 10.5 MB.
BACKLOG = 256
FORGOTTEN = 4  # that part of a backlog is forgotten at a time
TOGETHER = 64  # rows whose copies share memory


@define(eq=False)
class Late:
    """What the target left of rows of a slot that follow each other, from position `start` on: those of copies of its
    auxiliary hidden states from `first` on.
    """

    state: SlotState
    slot: int
    start: int
    count: int
    aux_hidden_states: Mapping[int, Tensor]
    first: int
    known: int = field(init=False, default=0)  # rows that were counted
    room: int = field(init=False, default=0)  # rows that it may have before anything else is to be done

    def longer(self, state: SlotState, segment: Segment, copies: Mapping[int, Tensor], first: int) -> bool:
        """Do these rows follow in both, the sequence and the copies? Then they are its own now."""
        follows = self.start + self.count == segment.start and self.first + self.count == first
        if not (follows and self.aux_hidden_states is copies and self.state is state):
            return False
        self.count += segment.count
        return True

    def shorter(self, rows: int) -> bool:
        """Without its first rows. Is nothing left?"""
        self.start, self.count, self.first = self.start + rows, self.count - rows, self.first + rows
        return not self.count


@define(eq=False)
class LateRows:
    """For what the target leaves of rows, so many together: a copy of one row costs no more than its bytes, and what
    nobody refers to any more is given back.
    """

    layers: Sequence[int]
    addresses: HostAddresses | None = field(init=False, default=None)  # of the copies, which are on a host
    _copies: dict[int, Tensor] = field(init=False, factory=dict)  # by layer, each `[at least TOGETHER, D]`
    _places: Sequence[tuple[int, int, int]] = field(init=False, default=())  # layers, addresses, bytes of a row: a host
    _moves: Sequence[tuple[int, int, int]] = field(init=False, default=())  # of `_source`: to, from, bytes of a row
    _source: Mapping[int, Tensor] | None = field(init=False, default=None)  # a bucket's, which steps come with again
    _rows: int = field(init=False, default=0)  # that they have
    _used: int = field(init=False, default=0)

    def keep(self, hidden: Mapping[int, Tensor], rows: int) -> tuple[Mapping[int, Tensor], int]:
        """Copies that have the first rows of each layer, `[at least rows, D]`, and from which of theirs on."""
        first = self._used
        if first + rows > self._rows:
            self._grow(hidden, max(rows, TOGETHER))
            first = 0
        self._used = first + rows
        if self._places and hidden is not self._source:
            found = all(hidden[layer].is_contiguous() for layer, _, _ in self._places)
            self._moves = [(to, hidden[layer].data_ptr(), width) for layer, to, width in self._places] if found else ()
            self._source = hidden
        for to, source, width in self._moves:
            move(to + first * width, source, rows * width)
        if not self._moves:
            for layer, copies in self._copies.items():
                copies[first : first + rows].copy_(hidden[layer][:rows])
        return self._copies, first

    def _grow(self, hidden: Mapping[int, Tensor], room: int) -> None:
        self._copies = {layer: hidden[layer].new_empty(room, *hidden[layer].shape[1:]) for layer in self.layers}
        self._rows = room  # only now: there may have been no memory
        host = all(copy.device.type == "cpu" for copy in self._copies.values())
        places = [(layer, copy.data_ptr(), copy.nbytes // room) for layer, copy in self._copies.items()]
        self._places, self._moves, self._source = places if host else (), (), None
        self.addresses = list_addresses([*self._copies.values()]) if host else None

    @property
    def spare(self) -> int:
        """Rows of these copies that nothing has been kept in, if they are on a host."""
        return 0 if self.addresses is None else self._rows - self._used

    def taken(self, rows: int) -> None:
        """So many more are."""
        self._used += rows


D = TypeVar("D", bound=DraftModel)


@define(eq=False)
class DraftContext(Generic[D]):
    """buckets: the row counts that forwards run with.

    A draft that is not loaded follows nothing: its context has a gap then. So it is when there is no memory for its
    buffers.
    """

    draft: D
    buckets: Sequence[int]
    _late: dict[int, list[Late]] = field(init=False, factory=dict)  # by slot
    _behind: Counter[int] = field(init=False, factory=Counter)  # rows of these
    backlog: int = field(init=False)  # rows that one forward can follow: catching up is never more than two of them
    late_rows: LateRows = field(init=False)
    _last: Late | None = field(init=False, default=None)  # that more rows may come to which are not counted yet
    _resting: bool = field(init=False, default=False)  # several have decoded and nobody proposed, since a prompt's rows

    def __attrs_post_init__(self) -> None:
        self.late_rows = LateRows(self.draft.aux_layers)
        self.backlog = min(BACKLOG, max(self.buckets))

    def follow(
        self, step: Step, aux_hidden_states: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        if self.draft.state != "loaded" or not any(kept):
            return
        counts = [segment.count for segment in step.segments]
        if (step.rows_only or sum(counts) == len(kept)) and max(counts) <= self.backlog:
            self._put_off(step.segments, counts, aux_hidden_states, states)
        else:
            shorter, staying = settled(step, kept, self.buckets)
            stay = taken({layer: aux_hidden_states[layer] for layer in self.draft.aux_layers}, staying, shorter.bucket)
            self._extend(shorter, stay, [state for state, keep in zip(states, kept, strict=True) if keep])

    def _put_off(
        self,
        segments: Sequence[Segment],
        counts: Sequence[int],
        aux_hidden_states: Mapping[int, Tensor],
        states: Sequence[SlotState],
    ) -> None:
        """Rows of a prompt, or one row each and nothing was proposed, or both. Every plain step comes through here."""
        self._count()
        copies, first = self.late_rows.keep(aux_hidden_states, sum(counts))
        resting, self._resting = self._resting or counts.count(1) > 1, counts.count(1) > 1
        for segment, count, state in zip(segments, counts, states, strict=True):
            slot = segment.slot
            late = self._late.get(slot)
            if late is None:
                late = self._late[slot] = []
            elif self._behind[slot] + count > self.backlog:
                if resting:
                    self._forget(slot, max(count, self.backlog // FORGOTTEN))
                else:
                    self.catch_up(slot)
                    late = self._late[slot] = []
            if not (late and late[-1].longer(state, segment, copies, first)):
                late.append(Late(state, slot, segment.start, count, copies, first))
            self._behind[slot] += count
            first += count
            late[-1].known = late[-1].count
        if len(segments) == 1:
            slot = segments[0].slot
            self._last = last = self._late[slot][-1]
            last.room = last.count + min(self.late_rows.spare, self.backlog - self._behind[slot])

    def next_row(self, slot: int, state: SlotState) -> Late | None:
        """What the slot's next row belongs to, if it comes alone and nothing else is to be done for it: it goes to row
        `first + count` of the late rows' copies, and counts from then on. Otherwise `follow` wants to hear of it.
        """
        last = self._last  # of a draft that is loaded: one that goes has followed everything before
        if last is None or last.count >= last.room or last.state is not state or last.slot != slot:
            return None
        return last if last.start + last.count == state.valid else None

    def _count(self) -> None:
        """Rows that came where `next_row` said are known, and no more come there."""
        last, self._last = self._last, None
        if last is not None:
            more = last.count - last.known
            self._behind[last.slot] += more
            self.late_rows.taken(more)
            last.known = last.count

    def _forget(self, slot: int, count: int) -> None:
        """So many rows are not followed, those of longest ago: there is a gap in the draft's context."""
        late = self._late[slot]
        while count and late:
            gone = min(count, late[0].count)
            self._behind[slot] -= gone
            count -= gone
            if late[0].shorter(gone):
                late.pop(0)

    def catch_up(self, *slots: int) -> None:
        """Follow what was put off of these slots, in as few forwards as hold it."""
        runs = [run for slot in slots for run in consecutive(self._taken(slot))]
        while runs:
            taken_now, rows = list[list[Late]](), 0
            while runs and rows + length(runs[0]) <= max(self.buckets) and fits(runs[0], taken_now):
                taken_now.append(runs.pop(0))
                rows += length(taken_now[-1])
            self._follow_late(taken_now, rows)

    def _taken(self, slot: int) -> Sequence[Late]:
        self._count()
        self._behind.pop(slot, None)
        return self._late.pop(slot, ())

    def _follow_late(self, runs: Sequence[Sequence[Late]], rows: int) -> None:
        bucket = next(bucket for bucket in self.buckets if bucket >= rows)
        parts = [late for run in runs for late in run]
        joined = {
            layer: torch.nn.functional.pad(
                torch.cat([late.aux_hidden_states[layer].narrow(0, late.first, late.count) for late in parts]),
                (0, 0, 0, bucket - rows),
            )
            for layer in self.draft.aux_layers
        }
        segments = tuple(Segment(run[0].slot, run[0].start, length(run)) for run in runs)
        self._extend(Step(segments, bucket), joined, [run[0].state for run in runs])

    def _extend(self, step: Step, aux_hidden_states: Mapping[int, Tensor], states: Sequence[SlotState]) -> None:
        tokens: list[int] = []
        for segment, state in zip(step.segments, states, strict=True):
            tokens += state.tokens[segment.start : segment.start + segment.count]
        try:
            self.draft.extend(step, torch.from_numpy(np.array(tokens, np.int64)), aux_hidden_states)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("the draft does not follow: %s", error)
            return
        for segment, state in zip(step.segments, states, strict=True):
            state.draft(segment.start, segment.start + segment.count)

    def opened(self, source: int, target: int, state: SlotState) -> None:
        self._taken(target)
        if source != target:
            for start, stop in state.context:
                self.draft.copy_rows(source, target, start, stop)


def consecutive(late: Sequence[Late]) -> list[list[Late]]:
    """Cut where a row is missing in between."""
    runs = list[list[Late]]()
    for one in late:
        if runs and runs[-1][-1].start + runs[-1][-1].count == one.start:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def length(run: Sequence[Late]) -> int:
    return sum(late.count for late in run)


def fits(run: Sequence[Late], others: Sequence[Sequence[Late]]) -> bool:
    """A slot comes once in a forward."""
    return all(run[0].slot != other[0].slot for other in others)


def settled(step: Step, kept: Sequence[Kept], buckets: Sequence[int]) -> tuple[Step, list[int]]:
    """The step as if only what stays had run, at the smallest bucket, and which rows of it that is."""
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


def taken(hidden: Mapping[int, Tensor], rows: Sequence[int], bucket: int) -> Mapping[int, Tensor]:
    """Those rows, which ascend, of each layer's `[R, D]`, padded to `[bucket, D]` with whatever is there."""
    if not rows or rows[-1] < len(rows):  # the first ones
        return {layer: states if states.shape[0] == bucket else states[:bucket] for layer, states in hidden.items()}
    index = torch.tensor([*rows, *[0] * (bucket - len(rows))])
    return {
        layer: states.index_select(0, index.to(states.device, non_blocking=True)) for layer, states in hidden.items()
    }
