"""The arithmetic of a decoder layer, as a small set of fused operations with one implementation per device kind.

Exactness lives here: every operation must give a row the same bits at every bucket, wherever the
row stands and whoever its neighbours are. What cannot be promised is caught by the numerics probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import Stack
from adapters.models.kernels.delta_interface import DeltaKernels
from adapters.models.kernels.experts_interface import EveryExpert, Experts, GatedWeights
from adapters.models.kernels.product_list import ProductPlan, Products, Proof
from adapters.models.kernels.step_batch import Batch, BlockBatch

T = TypeVar("T")

# Rows of a forward on a GPU up to which forwards share memory of the kernels', whatever their buckets. A wider one has
# nothing in common with them but the weights, so that it may run while one of them does.
NARROW = 128
# Rows of a forward on a GPU up to which kernels may be others where each row is in a slot of its own, and graphs too.
ALONE = 4


@frozen
class Rope:
    """Rotary tables, float32 `[capacity, n]` each, row p for position p (built once on the host in float32).

    n is half of what is rotated: hd / 2, or less, where only the first 2 n numbers of a head are.
    """

    cos: Tensor
    sin: Tensor


@frozen(eq=False)
class HeadPrep:
    """What projected heads go through before they are rotated: a bias, then RMSNorm of each head. None: they do not.

    bias: one number for each output of the projection, those of values included. q_norm, k_norm: `[hd]`, in the
    model's dtype or in float32; a model has both or neither; values have none.
    """

    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


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


@frozen(eq=False)
class WholeLayer:
    """All of a layer of attention with a dense feed-forward: what `Kernels.at_once` may carry out in one call.

    Norms, packed weights and caches are as the operations take them. width: columns of queries, keys and values in
    what is projected. before: `[R, D]`, where the residual stream is left as it comes into the layer, if anybody wants
    it. mask: what rows of blocks see; all others see what is up to them.
    """

    input_norm: Tensor
    projection: Any
    width: int
    prep: HeadPrep
    out: Any
    post_norm: Tensor
    feed: GatedWeights
    eps: float
    k_cache: Tensor
    v_cache: Tensor
    before: Tensor | None
    mask: AttentionMask


@frozen(eq=False)
class Embedding:
    """table: `[V, D]`. masked: `[D]`, in the place of the row of token `mask`, if there is one."""

    table: Tensor
    masked: Tensor | None = None
    mask: int = -1


@frozen(eq=False)
class ContextLayer:
    """What a draft's layer keeps of context rows: the packed weight of keys and values, and where they go."""

    kv: Any
    prep: HeadPrep
    k_cache: Tensor
    v_cache: Tensor


class ContextAtOnce(Protocol):
    """Context rows of a draft, in every layer, for steps of one bucket."""

    def run(self, given: Tensor, batch: Batch) -> None:
        """given `[R, K D]`: what the target's auxiliary layers left of the rows, side by side."""
        ...


class LayersAtOnce(Protocol):
    """Some layers, one after the other, for steps of one bucket."""

    def run(self, residual: Tensor, batch: Batch, *, stops: bool) -> None:
        """residual `[R, D]`, in place; where there is an embedding, what the batch's tokens are in it. stops: the last
        layer stops once its keys and values are written, and the residual means nothing then.
        """
        ...


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
    def paged(self) -> bool:
        """Can rows be read and written wherever `Batch.pages` says that they are? Else they are in one piece."""
        ...

    @property
    def packs_experts(self) -> bool:
        """Do experts stay packed as other weights do? Else they are unpacked as they are loaded."""
        ...

    @property
    def kv_tile(self) -> int:
        """Keys are read in tiles of this many at absolute positions: the caches' capacity is a multiple of it."""
        ...

    @property
    def delta(self) -> DeltaKernels | None:
        """The operations of recurrent layers; None where there are none for the device."""
        ...

    @property
    def numbers(self) -> tuple[object, ...]:
        """All that bits depend on of the plan they run by; nothing where there is none."""
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

    def pack(self, weight: Tensor | Stack) -> Any:
        """`[N, K]` on the device -> whatever `linear` likes best; the caller may drop `weight` afterwards.

        Of a stack what is packed stays so, where there are products for it, proven ones where any have to be.
        """
        ...

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """`[R, K]` -> `[R, N]`: x @ weight.T, accumulated in float32, rounded once."""
        ...

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """residual `[R, D]` += delta, in place; then RMSNorm of it.

        The sum is rounded to the model's dtype, the norm is computed in float32 and multiplied by weight `[D]`: in the
        model's dtype, or in float32 and rounded once, as the weight's dtype is. Returns a new `[R, D]`.
        """
        ...

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """qkv `[R, (H + 2 KV) hd]`, rows laid out `q heads | k heads | v heads` -> q `[R, H, hd]`.

        What `prep` says, half-split rotary of q and k at each row's position over as much of the head as the tables
        are for, then k and v are written at (slot, position). The rows of qkv may be columns of a wider tensor. The
        returned q may be laid out however `attend` likes best.
        """
        ...

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        """kv `[R, 2 KV hd]`, rows laid out `k heads | v heads`: `rotate_store` for rows that ask nothing.

        A draft's context rows are written so; a bias is one of these outputs then.
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

    def pack_gated(self, weight: Tensor | Stack) -> Any:
        """`[2 I, K]`, rows laid out `gate | up` -> whatever `gated` likes best (a GPU interleaves the two)."""
        ...

    def gated(self, x: Tensor, packed: Any) -> Tensor:
        """x `[R, K]` -> silu(gate) * up `[R, I]`; where it rounds on the way is open.

        One operation, so that a device can finish the product before it leaves the registers.
        """
        ...

    def stacked(self, each: Iterable[GatedWeights], count: int) -> EveryExpert:
        """The `count` experts of a layer, as `experts` likes them best; each is read once, and not kept where it was if
        it is copied.
        """
        ...

    def experts(self, x: Tensor, experts: Experts, batch: Batch) -> Tensor:
        """x `[R, D]` -> what each row's experts make of it, weighted and added up, `[R, D]`; padded rows may be zeros.

        A row's bits depend on neither which experts others go through nor how many rows an expert has.
        """
        ...

    def at_once(
        self, layers: Sequence[WholeLayer], rope: Rope, rows: int, embedding: Embedding | None
    ) -> LayersAtOnce | None:
        """What carries these layers out in one call, in steps of so many rows; the bits are those of the operations
        one by one. None: there is nothing that does. embedding: of the first layer of a model.
        """
        ...

    def context_at_once(
        self, fc: Any, norm: Tensor, eps: float, layers: Sequence[ContextLayer], rope: Rope, rows: int
    ) -> ContextAtOnce | None:
        """The same of a draft's context: `linear` with `fc`, `add_norm`, and for each layer `linear` and `store`."""
        ...

    def logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: Any, out: Tensor) -> None:
        """What `linear` makes of the `add_norm` of hidden `[R, D]`, in float32: out `[R, V]`."""
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
