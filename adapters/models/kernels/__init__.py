"""The arithmetic of a decoder layer, as a small set of fused operations with one implementation per device kind.

Exactness lives here: every operation must give a row the same bits at every bucket, wherever the
row stands and whoever its neighbours are. What cannot be promised is caught by the numerics probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.products import ProductPlan, Products
from adapters.models.kernels.proof import Proof
from adapters.models.shard import Segment, Step

T = TypeVar("T")


@frozen
class Rope:
    """Rotary tables, float32 `[capacity, hd / 2]` each, row p for position p (built once on the host in float32)."""

    cos: Tensor
    sin: Tensor


@define(eq=False)
class Batch:
    """What one step tells the kernels: static buffers of one bucket, filled anew before every forward.

    On the device, one int64 value a row (views of one `[4, bucket]` tensor, so that one copy fills them):

    tokens    token id; 0 in padded rows (a later shard, which gets hidden states, leaves it at 0)
    slots     slot whose sequence the row belongs to; 0 in padded rows
    positions the row's position in its sequence; -1 marks a padded row
    lengths   keys the row attends to, `positions + 1`; so 0 in padded rows

    Rows of one segment are consecutive and their positions are too; real rows come first, padded rows last. No slot
    appears in two segments. A padded row must not write to the caches; what it computes is never read, but it must
    stay finite.

    segments is the same fact on the host, for kernels that choose their work there. Inside `Kernels.launch` a kernel
    that records graphs must read the device tensors only, unless the choice is part of the graph's key.
    plan is the kernels' own: what `Kernels.prepare` worked out for this step.
    """

    bucket: int
    device: torch.device
    _columns: ClassVar[int] = 4
    table: Tensor = field(init=False)
    tokens: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    segments: tuple[Segment, ...] = field(init=False, default=())
    plan: Any = field(init=False, default=None)
    _staging: Tensor = field(init=False)
    _copied: torch.cuda.Event | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        on_cuda = self.device.type == "cuda"
        self._staging = torch.zeros(self._columns, self.bucket, dtype=torch.int64, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.table = self._staging if self.device.type == "cpu" else self._staging.to(self.device)
        self.tokens, self.slots, self.positions, self.lengths = self.table[:4].unbind(0)

    def load(self, step: Step, tokens: Tensor | None) -> None:
        """Fill the buffers from `step`; tokens: int64 `[rows]` on any device, or None on a later shard."""
        staging, row = self._staging, 0
        if self._copied is not None:
            self._copied.synchronize()
        staging.zero_()
        staging[2].fill_(-1)
        for segment in step.segments:
            end = row + segment.count
            staging[1, row:end] = segment.slot
            torch.arange(segment.start, segment.start + segment.count, out=staging[2, row:end])
            row = end
        self._measure(step, staging)
        on_host = tokens is not None and tokens.device.type == "cpu"
        if tokens is not None and on_host:
            staging[0, :row] = tokens
        if self.table is not staging:
            self.table.copy_(staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if tokens is not None and not on_host:
            self.tokens[:row].copy_(tokens)
        self.segments = step.segments

    def _measure(self, step: Step, staging: Tensor) -> None:  # noqa: ARG002 - a batch of blocks needs the step
        torch.add(staging[2], 1, out=staging[3])


@define(eq=False)
class BlockBatch(Batch):
    """A batch whose segments are blocks of a draft: positions `[start, stop)` behind context rows `[first, start)`.

    lengths are the blocks' stops here: the keys that the block as a whole may see. Two more views tell
    starts the position of the block's first row; 0 in padded rows
    firsts the block's first valid context row; 0 in padded rows
    before is firsts on the host, one a segment; to be set before `load`.
    """

    _columns: ClassVar[int] = 6
    starts: Tensor = field(init=False)
    firsts: Tensor = field(init=False)
    before: tuple[int, ...] = field(init=False, default=())

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.starts, self.firsts = self.table[4:].unbind(0)

    def _measure(self, step: Step, staging: Tensor) -> None:
        row = 0
        for segment, first in zip(step.segments, self.before, strict=True):
            rows = slice(row, row + segment.count)
            staging[3, rows], staging[4, rows], staging[5, rows] = segment.start + segment.count, segment.start, first
            row += segment.count


@frozen
class AttentionMask:
    """What a row of a block sees of the keys `[first, stop)` of its block.

    causal: nothing behind itself; else the block to its end. window: of the keys up to itself (which counts) only
    the last so many; 0: all.
    """

    causal: bool = False
    window: int = 0

    def lowest(self, first: int, position: int) -> int:
        """The first key that the row at `position` sees."""
        return max(first, position - self.window + 1) if self.window else first


class Kernels(Protocol):
    """Fused operations on one device, all in the model's dtype unless said otherwise. One instance serves one shard.

    Shapes: R bucket, D hidden, H query heads, KV key/value heads (H a multiple of KV), hd head size, I intermediate.
    Caches of one layer: `[slots, KV, capacity, hd]`, zeroed at start, so what is masked is always finite.
    """

    @property
    def name(self) -> str:
        """Names the implementation in the numerics class; changes whenever its bits may."""
        ...

    @property
    def kv_tile(self) -> int:
        """Keys are read in tiles of this many at absolute positions: the caches' capacity is a multiple of it."""
        ...

    def fresh(self) -> Kernels:
        """The same kernels for another shard: nothing that was recorded or kept for this one."""
        ...

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:
        """Multiply in every shape of the list and tell which agree; kernels that never cut a sum have no plan.

        known: what kernels of this kind were proven for here before, which is not multiplied again.
        """
        ...

    def using(self, plan: ProductPlan | None) -> Kernels:
        """Fresh ones that run in the shapes of a plan and in no other."""
        ...

    def pack(self, weight: Tensor) -> Any:
        """`[N, K]` on the device -> whatever `linear` likes best; the caller may drop `weight` afterwards."""
        ...

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """`[R, K]` -> `[R, N]`: x @ weight.T, accumulated in float32, rounded once."""
        ...

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """residual `[R, D]` += delta, in place; then RMSNorm of it.

        The sum is rounded to the model's dtype, the norm is computed in float32 and multiplied by
        weight `[D]`. Returns a new `[R, D]`.
        """
        ...

    def rotate_store(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: Rope,
        batch: Batch,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """qkv `[R, (H + 2 KV) hd]`, rows laid out `q heads | k heads | v heads` -> q `[R, H, hd]`.

        Per-head RMSNorm of q and k (weights `[hd]`), half-split rotary at each row's position over the whole head,
        then k and v are written at (slot, position). The returned q may be laid out however `attend` likes best.
        """
        ...

    def store(
        self, kv: Tensor, k_norm: Tensor, eps: float, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """kv `[R, 2 KV hd]`, rows laid out `k heads | v heads`: `rotate_store` for rows that ask nothing.

        A draft's context rows are written so.
        """
        ...

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        """Causal attention, scale hd ** -0.5: the row at position p of slot s sees keys `[0, p]` of s. -> `[R, H hd]`.

        Query head h reads key/value head `h // (H / KV)`. A row's bits may depend on its own keys only, so tiles
        start at absolute positions and what lies past the row's length contributes exact zeros. The rows of q may be
        some of those that `rotate_store` returned, in a batch of their own.
        """
        ...

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask
    ) -> Tensor:
        """Attention of a draft's blocks over their context and themselves, as `mask` tells. -> `[R, H hd]`.

        The blocks' own keys and values are in the caches, at their positions. Of a cache's other rows only those that
        the block may see have a say; a block's bits depend on what it sees, its positions and its size.
        """
        ...

    def pack_gated(self, weight: Tensor) -> Any:
        """`[2 I, K]`, rows laid out `gate | up` -> whatever `gated` likes best (a GPU interleaves the two)."""
        ...

    def gated(self, x: Tensor, packed: Any) -> Tensor:
        """x `[R, K]` -> silu(gate) * up `[R, I]`; where it rounds on the way is open.

        One operation, so that a device can finish the product before it leaves the registers.
        """
        ...

    def prepare(self, batch: Batch) -> None:
        """Called once a forward, after `batch.load` and before `launch`: host work that all layers share."""
        ...

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:
        """Run `body`, a fixed sequence of kernel calls over static buffers that never waits for the device.

        A plain implementation calls it. One that records graphs captures it on first use for (name, bucket) and
        replays it later; the tensors that `body` returned are then the graph's own and are filled again each time.
        """
        ...
