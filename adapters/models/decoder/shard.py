"""The interface of a shard: a contiguous range of a target's layers, with its weights and its slots.

The executor, the transfers to a store and the probe use a target through this interface only. Its layers may be in this
process (`DenseShard`), in another one (`RemoteShard`), or spread over several shards (`Pipeline`).

A shard consists of parts:

* `ShardSpec` says what it is. It never changes.
* `SlotRows` holds the rows that slots keep: keys and values, one row for each token. Rows may be cut, copied and
  overwritten at will.
* `PositionalStates` holds the state of recurrent layers. A state stands for all tokens up to one position, and the
  state at an earlier position cannot be made from it. A model with attention alone has no such state.
* The shard itself runs steps: `forward`, then `commit`, and `logits` on the last shard.

Nothing that crosses the interface is shared. Slots are numbers, rows are half-open spans of positions, and tensors are
named by their layer in the whole model (`layers.12.k`). So rows that one split of a model exported can be imported by
another split with the same numerics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.models.kernels.formats.row_format import Rows
from adapters.models.kernels.step import Forward, Step
from adapters.sequence_layout import RowSpec, TensorSpec

BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512)  # the default row counts of forwards
# Those on a GPU, as far as they are below a chunk. On an H200 one row of an 8B shape takes 12 % less time than four in
# Q4_K, and 2 % less in bfloat16.
GPU_BUCKETS = (1, *BUCKETS, 1024, 2048)
NamedTensors: TypeAlias = Mapping[str, Tensor]
FindCaches: TypeAlias = Callable[[int], tuple[Tensor, Tensor, Tensor | None]]  # see `OutputHead`
# The rows that stay of one slot in a step: the first this many; or, for a tree, the rows of one path from its root,
# numbered from the slot's first row. If nothing stays, this is 0 or an empty path.
Kept: TypeAlias = int | tuple[int, ...]


def list_buckets(device: torch.device) -> tuple[int, ...]:
    """Return the default row counts of forwards on a device, ascending, without that of a chunk."""
    return GPU_BUCKETS if device.type == "cuda" else BUCKETS


@frozen(eq=False)
class OutputHead:
    """The output head of a target.

    packed: the head `[V, D]` as the target's kernels packed it. A draft on kernels of the same kind uses it as it is.
    norm: the weights `[D]` of the final norm before the head, in the form that `Kernels.add_norm` takes.
    find_caches: returns the keys and values that a layer attends to, and the table of their pages, if there is one.
        ValueError if the layers with this head do not have them. None: the layers are in another process.
    """

    packed: Any
    norm: Tensor
    find_caches: FindCaches | None = None


@frozen(eq=False)
class TargetHead:
    """The tensors that a draft shares with its target: a draft has neither an embedding nor a head of its own.

    embedding: `[V, D]` in the target's dtype, on the device of the output head or in host memory that this device can
        read (`Kernels.embed` accepts both).
    packed, norm, find_caches: as in `OutputHead`. find_caches: None for copies on another device, too.
    """

    embedding: Tensor
    packed: Any
    norm: Tensor
    find_caches: FindCaches | None = None


@frozen(kw_only=True)
class ShardSpec:
    """The facts about a shard that never change.

    capacity: rows of a slot.
    buckets: the row counts that `Shard.forward` accepts, ascending.
    cpu_experts: the layers whose experts the host computes.
    runs_ahead: `Shard.forward` returns before the device is done, and accepts token ids on the device that are still
        being picked.
    """

    layers: range
    slots: int
    capacity: int
    buckets: tuple[int, ...]
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    runs_ahead: bool = False
    cpu_experts: range = range(0)


@frozen(kw_only=True)
class ShardPlacement:
    """The request to build a shard: its device, its layers, and its room for requests.

    rows: the types that keys and values are kept in (`RowTypes`); None: the dtype of the computation.
    layers: None: all layers. The embedding comes with the first one, final norm and head with the last one.
    capacity: rows of a slot, at least; it is rounded up to whole key tiles of the kernels.
    buckets: the row counts that `Shard.forward` shall accept.
    aux_layers: global numbers of layers whose outputs every forward leaves in its `aux_hidden_states` (`hidden_states[i
        + 1]` in transformers).
    state_checkpoints: checkpoints of positional state in addition to the slots. A model without such state makes none.
    pages: pages of the pool that slots take their rows from; 0: each slot has memory for all of its rows.
    offload_embedding: keep the embedding in host memory, if it is not the head as well and the device can read it.
    """

    device: torch.device = field(default=torch.device("cpu"), converter=torch.device)
    dtype: torch.dtype = torch.float32
    rows: Rows | None = None
    layers: range | None = None
    slots: int = 4
    capacity: int = 8192
    buckets: Sequence[int] = BUCKETS
    aux_layers: Sequence[int] = ()
    state_checkpoints: int = 0
    pages: int = 0
    offload_embedding: bool = False


class ReadableRows(Protocol):
    """Rows of slots that can be read, those of a shard or of a draft.

    spec: names, shape and dtype of the rows. is_addressable: `view` may be called.
    """

    @property
    def spec(self) -> RowSpec: ...

    @property
    def is_addressable(self) -> bool: ...

    def view(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the rows where they are: a view `[layers, parts, heads, stop - start, width]` in the order of `spec`.

        On a CUDA device the rows must be in one page, else ValueError. Any thread may read and write the rows if no
        other thread uses them at that time.
        """
        ...

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        """Return rows `[start, stop)` on the host, each `[KV, stop - start, hd]`: `layers.N.k` and `layers.N.v`."""
        ...


class SlotRows(ReadableRows, Protocol):
    """The rows that slots of a shard keep: keys and values of its layers, one row for each token."""

    def seat(self, slot: int, source: int, keep: int, pages: Sequence[int]) -> None:
        """Give the slot these pages of PAGE rows in place of its own, and rows `[0, keep)` of the source in them.

        The source may be the slot itself. Rows in a page that both have stay where they are; other rows are copied.
        Only a shard that was built with a pool of pages has this.
        """
        ...

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        """Add pages of the pool to a slot, behind its last page."""
        ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy rows `[0, count)` of slot `source` into slot `target`. Positional state is not copied."""
        ...

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        """Write rows that `export` returned, from row `start` on. ValueError for another name, shape or dtype."""
        ...


class PositionalStates(Protocol):
    """The positional state of some layers, for each slot, and checkpoints of such states on the device.

    It is that of recurrent layers, or the last rows of layers with a window.

    A state stands at a multiple of `block`. A slot with n settled rows has the state at the last multiple at or below
    n, and what the rows after it will change in it. So the slot's next forward may start anywhere from there to n,
    which forgets the rows behind that start; or it may start at 0, from no state. ValueError for any other start.

    specs: the tensors of a state; empty where there is no state. checkpoint_count: how many checkpoints there are,
    numbered from 0. The caller decides what a checkpoint holds.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def block(self) -> int: ...

    @property
    def checkpoint_count(self) -> int: ...

    @property
    def commits_per_segment(self) -> bool:
        """May a step that decodes have more than 64 rows of another slot, which are committed at once?"""
        ...

    @property
    def tree_obstacle(self) -> str:
        """Why steps cannot have trees, as a part of a sentence; empty if they can."""
        ...

    @property
    def survives_failure(self) -> bool:
        """Can a slot go on from its state after a forward of rows only that failed? If not, it has none then."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` continue from wherever slot `source` may continue."""
        ...

    def export(self, slot: int) -> NamedTensors:
        """Return copies of the slot's state: the one at the last multiple of `block` in its settled rows.

        On a GPU of this process the copies are on that GPU, behind everything that its stream was given. The host does
        not wait for them. The states of other shards are in host memory.
        """
        ...

    def import_(self, slot: int, state: NamedTensors, at: int) -> None:
        """Write a state that `export` returned, in host memory or on the device of the slot, where it is quicker.

        at: the row at which it stands. ValueError for another name, shape or dtype, or a row at which no state stands.
        """
        ...

    def keep(self, slot: int, checkpoint: int) -> None:
        """Copy the state that `export` would return into a checkpoint, on the device."""
        ...

    def load(self, checkpoint: int, slot: int) -> None:
        """Copy the state of a checkpoint into any slot, which then stands at that position."""
        ...


class Shard(Protocol):
    """Layers `[first, last)` of a target on one device. Every call runs on the lane's thread, but for `rows.view`."""

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def rows(self) -> SlotRows: ...

    @property
    def states(self) -> PositionalStates: ...

    @property
    def embedding(self) -> Tensor:
        """`[V, D]`, in the model's dtype, and scaled if the model scales it. First shard only; ValueError elsewhere."""
        ...

    @property
    def output(self) -> OutputHead:
        """Last shard only; ValueError elsewhere."""
        ...

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        """Run `step` through the layers, and write rows `[start, start + count)` of each segment's slot.

        inputs: on the first shard int64 token ids `[rows]`, which the shard pads to the bucket; on any other shard
        hidden states `[bucket, D]`. Rows below `start` must be valid. Rows from `start + count` on become garbage:
        attention never reads beyond a row's own position.

        A step of `rows_only` is settled at once. Any other step is settled by `commit`; without it, the step counts as
        if it had never run. In recurrent layers more than 64 rows of a slot are settled at once in any step, except for
        the last ones: without a `commit` that keeps all rows but one at least, the slot's state is undefined. A shard
        refuses them by name if it cannot do so in a step that decodes (`PositionalStates.commits_per_segment`).
        It also refuses trees, since each node would need a state of its own.

        If a forward raises, no slot's state has moved. The exceptions: the state of a slot that started at 0 is lost,
        and that of a slot whose rows would have been settled, unless `states.survives_failure`.
        """
        ...

    def settling(self, step: Step) -> AbstractContextManager[None]:
        """Return a context for this shard's forward and those of the shards behind it.

        If one of them raises, what a step of `rows_only` has settled here is put back.
        """
        ...

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        """Keep these rows of the last step, for each of its slots in order, and roll the others back.

        A chain is rolled back by forgetting its length. The path that stays of a tree is moved to its positions. A
        recurrent layer moves its state to the next multiple of `states.block` if the kept rows reach it. If only the
        last row of a chain was left out, a later `commit` of a step of that row alone keeps it. No other forward or
        copy may have used the slot in between.
        If this raises, the rows and states of all slots of the step are undefined.
        """
        ...

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to `hidden[bucket, D]`: float32 `[bucket, V]`. Last shard only."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of `weights`, `kv` and `buffers` on the device, and of `host`.

        `host` counts weights in host memory that the device reads there, and experts that the host computes. Experts
        that are brought to the device are not counted.
        """
        ...

    def close(self) -> None:
        """Give the memory back. The shard cannot be used afterwards."""
        ...
