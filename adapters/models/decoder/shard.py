"""The model shard: the one interface behind which a target's layers live, local or remote.

A shard owns a contiguous range of layers, its weights and its slots. What crosses the interface is named, never
shared: slots are numbers, rows are half-open spans of positions, tensors are named by *global* layer
(`layers.12.k`), so another split of the same numerics classes can take them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.step import Forward, Step
from adapters.sequence_layout import RowSpec, TensorSpec

BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512)  # the row counts of forwards where nobody says otherwise
NamedTensors: TypeAlias = Mapping[str, Tensor]
# What stays of one slot's rows in a step: the first so many, or, of a tree, those of one path from its root on,
# numbered from the slot's first row. Nothing: 0, or no path.
Kept: TypeAlias = int | tuple[int, ...]


@frozen(eq=False)
class OutputHead:
    """packed: the head `[V, D]` as the target's kernels packed it, so a draft on the same kind of kernels multiplies
    with it as it is. norm: `[D]`, what the final norm before the head multiplies with, as `Kernels.add_norm` takes it.
    """

    packed: Any
    norm: Tensor


@frozen(eq=False)
class TargetHead:
    """What a draft shares with its target: it has neither embedding nor head of its own.

    embedding: `[V, D]` in the target's dtype, on the device of the output head or in host memory that it reads
    (`Kernels.embed` does either). packed, norm: of `OutputHead`.
    """

    embedding: Tensor
    packed: Any
    norm: Tensor


class Shard(Protocol):
    """Layers `[first, last)` of one target on one device. Every call runs on the lane's thread, but for `rows`.

    What a slot keeps of its sequence is of two kinds. Rows, one for every token, are cut, copied and overwritten at
    will: `row_spec` says what they are. Positional state stands for all tokens up to one position and cannot be cut
    out of a later one: `state_specs` lists its tensors, and is empty for attention alone.

    Positional state stands at multiples of `state_block`: a slot with n settled rows has the state at the last multiple
    at or below n, and what was set aside of the rows after it. So its next forward may start anywhere from there to n,
    which forgets the rows behind that start, or at 0, from no state. A start where nothing is is a ValueError.
    `state_places` are room for more such states on the device, beside the slots; who holds which is for others to know.
    """

    @property
    def layers(self) -> range: ...

    @property
    def slots(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Rows of a slot."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """The row counts that `forward` accepts, ascending."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def runs_ahead(self) -> bool:
        """Does `forward` return before it is done, and take token ids on the device that are still being picked?"""
        ...

    @property
    def embedding(self) -> Tensor:
        """`[V, D]`, in the model's dtype. First shard only; ValueError elsewhere."""
        ...

    @property
    def output(self) -> OutputHead:
        """Last shard only; ValueError elsewhere."""
        ...

    @property
    def row_spec(self) -> RowSpec:
        """The rows of layers that have any, named as `export_rows` names them."""
        ...

    @property
    def state_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of `export_state`."""
        ...

    @property
    def state_block(self) -> int:
        """Positional state stands at multiples of so many rows; of no matter where there is none."""
        ...

    @property
    def state_places(self) -> int:
        """Places for states, numbered from 0; none where there is no state."""
        ...

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        """Run `step` through the layers, writing KV rows `[start, start + count)` of each segment's slot.

        inputs: int64 `[rows]` token ids on the first shard (the shard pads to the bucket), otherwise hidden states
        `[bucket, D]`. Rows below `start` must be valid. Rows past `start + count` become garbage: attention never
        reads beyond a row's own position.

        A step of `rows_only` is settled at once. Any other one is settled by `commit`; without it, none of its rows
        have happened. A shard with recurrent layers refuses trees by name, since each node would need a state of its
        own, and more than 64 rows of a slot in a step that is not settled at once.
        Where a forward raises, no slot's state has moved; where it starts at 0, the slot had none to keep.
        """
        ...

    def settling(self, step: Step) -> AbstractContextManager[None]:
        """Around this shard's forward and those of the shards after it. If one of them raises, what a step of
        `rows_only` has settled here is put back.
        """
        ...

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        """What stays of the step that ran last, for each of its slots in order; the rest is rolled back.

        A chain is rolled back by forgetting its length, and a tree's path put at its positions. A recurrent layer moves
        its state to the next multiple of `state_block`, if the kept rows come so far, from what it set aside of them.
        Where it raises, no slot of the step is to be believed.
        """
        ...

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        """Final norm and head over `hidden[bucket, D]`: float32 `[bucket, V]`. Last shard only."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device here has been done."""
        ...

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copy rows `[0, count)` of slot `source` into slot `target`; not its positional state."""
        ...

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        """From now on the slot has these pages of PAGE rows, and rows `[0, keep)` of the source, which may be itself:
        those in a page of both stay where they are, the others are copied. Of a shard that was built with a pool.
        """
        ...

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        """And these pages behind them."""
        ...

    def copy_state(self, source: int, target: int) -> None:
        """The target may go on from wherever the source may."""
        ...

    @property
    def addressed(self) -> bool:
        """May `rows` be called?"""
        ...

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Rows where they are: a view `[layers, 2, heads, stop - start, width]` in the order of `row_spec`. On a CUDA
        device of one page only, ValueError otherwise.

        Any thread that knows that nobody else uses these rows may read and write them.
        """
        ...

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        """KV rows `[start, stop)` as `layers.N.k` and `layers.N.v`, each `[KV, stop - start, hd]`, on the host."""
        ...

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        """Put what `export_rows` gave back at `start`; a name, shape or dtype that is not ours is a ValueError."""
        ...

    def export_state(self, slot: int) -> NamedTensors:
        """The slot's positional state, on the host: at the last multiple of `state_block` in its settled rows."""
        ...

    def import_state(self, slot: int, state: NamedTensors) -> None:
        """Put what `export_state` gave back: the slot goes on where that stood, which the next forward's start tells.

        A name, shape or dtype that is not ours is a ValueError.
        """
        ...

    def keep_state(self, slot: int, place: int) -> None:
        """Copy what `export_state` would give into a place, on the device."""
        ...

    def load_state(self, place: int, slot: int) -> None:
        """Put what was kept in a place back, into any slot, which then stands at that position."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes held on the device: `weights`, `kv`, `buffers`; and `host`, those of weights in host memory that it
        reads there, but for experts.
        """
        ...

    def close(self) -> None: ...
