"""Rows of a target that a draft has not followed yet: spans of rows, and the memory with their hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field
from torch import Tensor

from adapters.device.slots.slots import SlotState
from adapters.models.decoder.cache.host_copy import move
from adapters.models.kernels.host_addresses import HostAddresses, list_addresses
from adapters.models.kernels.step import Segment

ROWS_PER_COPY = 256  # rows whose copies share one tensor per layer


@define(eq=False)
class DeferredRows:
    """Neighbouring rows of a slot, from position `start` on, for which a draft has no rows of its own yet.

    The target's hidden states of these rows are in `aux_hidden_states`, by layer: `count` rows from row `first` on,
    `stride` rows apart. Decode steps of several requests put the rows of each that far apart.

    A fused decode step may add a row at the end itself: it writes the hidden states there and raises `count`, as long
    as `count` stays below `room`. The backlog does not see that at once. `counted` is the `count` that it has seen.
    """

    state: SlotState
    slot: int
    start: int
    count: int
    aux_hidden_states: Mapping[int, Tensor]
    first: int
    stride: int = 1
    counted: int = field(init=False, default=0)
    room: int = field(init=False, default=0)

    def append_rows(
        self, state: SlotState, segment: Segment, copies: Mapping[int, Tensor], first: int, stride: int
    ) -> bool:
        """Add the rows if they follow the last one both in the sequence and in the copies. Return whether they did."""
        follows = self.start + self.count == segment.start and self.first + self.count * self.stride == first
        if not (follows and self.stride == stride and self.aux_hidden_states is copies and self.state is state):
            return False
        self.count += segment.count
        return True

    def drop_first_rows(self, rows: int) -> bool:
        """Drop this many rows at the front. Return whether none is left."""
        self.start += rows
        self.count -= rows
        self.first += rows * self.stride
        return not self.count

    def select_rows(self, layer: int) -> Tensor:
        """Return the hidden states `[count, D]` of a layer, as a view."""
        return self.aux_hidden_states[layer][self.first : self.first + self.count * self.stride : self.stride]


@define(eq=False)
class DeferredBatch:
    """The spans of several requests that decode together. Their last step has put one row of each behind the other.

    As long as the same requests decode and nothing else concerns their backlogs, each step adds one row to each span.
    Then nothing is looked up for each request, since that takes longer than the copies. The backlogs do not see these
    rows at once, as with fused steps.

    states: of the requests. starts: the positions of the next rows. first: the next row of the copies. room: further
    steps that all backlogs have room for.
    """

    spans: Sequence[DeferredRows]
    states: Sequence[SlotState]
    starts: list[int]
    first: int
    room: int

    def append_step(
        self, segments: Sequence[Segment], states: Sequence[SlotState], copies: Mapping[int, Tensor], first: int
    ) -> bool:
        """Add a row to each span if these are the next rows of the same requests. Return whether they are."""
        follows = self.first == first and self.spans[0].aux_hidden_states is copies and self.room > 0
        if not (follows and self.states == states and self.starts == [one.start for one in segments]):
            return False
        for span in self.spans:
            span.count += 1
        self.starts = [start + 1 for start in self.starts]
        self.first += len(segments)
        self.room -= 1
        return True


@define(eq=False)
class DeferredRowBuffer:
    """Holds copies of auxiliary hidden states, ROWS_PER_COPY rows or more in one tensor per layer.

    Sharing a tensor makes the copy of one row cost no more than its bytes. A tensor is freed when no `DeferredRows`
    refers to it any more. addresses: of the current tensors, if they are in host memory.
    """

    layers: Sequence[int]
    addresses: HostAddresses | None = field(init=False, default=None)
    _copies: dict[int, Tensor] = field(init=False, factory=dict)  # by layer, each `[at least ROWS_PER_COPY, D]`
    # In host memory: per layer its number, the address of its copies, and the bytes of a row.
    _targets: Sequence[tuple[int, int, int]] = field(init=False, default=())
    # From the buffers of `_source`: per layer the address to copy to, the one to copy from, and the bytes of a row.
    _moves: Sequence[tuple[int, int, int]] = field(init=False, default=())
    _source: Mapping[int, Tensor] | None = field(init=False, default=None)  # steps of one bucket come with the same one
    _rows: int = field(init=False, default=0)  # that the current tensors have
    _used: int = field(init=False, default=0)

    def keep(self, hidden: Mapping[int, Tensor], rows: int) -> tuple[Mapping[int, Tensor], int]:
        """Copy the first rows of each layer. Return the copies, `[at least rows, D]`, and their first row there."""
        first = self._used
        if first + rows > self._rows:
            self._grow(hidden, max(rows, ROWS_PER_COPY))
            first = 0
        self._used = first + rows
        if self._targets and hidden is not self._source:
            self._find_moves(hidden)
        for to, source, width in self._moves:
            move(to + first * width, source, rows * width)
        if not self._moves:
            for layer, copies in self._copies.items():
                copies[first : first + rows].copy_(hidden[layer][:rows])
        return self._copies, first

    def _find_moves(self, hidden: Mapping[int, Tensor]) -> None:
        """Look the addresses of these buffers up once: steps of one bucket come with the same ones again."""
        is_contiguous = all(hidden[layer].is_contiguous() for layer, _, _ in self._targets)
        targets = self._targets if is_contiguous else ()
        self._moves = [(to, hidden[layer].data_ptr(), width) for layer, to, width in targets]
        self._source = hidden

    def _grow(self, hidden: Mapping[int, Tensor], room: int) -> None:
        self._copies = {layer: hidden[layer].new_empty(room, *hidden[layer].shape[1:]) for layer in self.layers}
        # Only now that the memory is there: the line above may raise.
        self._rows = room
        is_on_host = all(copy.device.type == "cpu" for copy in self._copies.values())
        targets = [(layer, copy.data_ptr(), copy.nbytes // room) for layer, copy in self._copies.items()]
        self._targets = targets if is_on_host else ()
        self._moves = ()
        self._source = None
        self.addresses = list_addresses([*self._copies.values()]) if is_on_host else None

    @property
    def unused_rows(self) -> int:
        """Unused rows of the current tensors; 0 if they are not in host memory."""
        return 0 if self.addresses is None else self._rows - self._used

    def mark_used(self, rows: int) -> None:
        """Count rows that a fused decode step put there itself."""
        self._used += rows
