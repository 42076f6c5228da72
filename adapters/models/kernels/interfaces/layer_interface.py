"""The arithmetic of a decoder layer, as a small set of fused operations with one implementation per device kind.

Exactness is promised here: every operation must give a row the same bits at every bucket, wherever the row stands and
whatever its neighbours are. The numerics probe catches what cannot be promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.activations import SILU
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.delta_interface import DeltaKernels
from adapters.models.kernels.interfaces.experts_interface import EveryExpert, Experts, GatedWeights
from adapters.models.kernels.interfaces.fused_layers import Embedding, FusedLayers
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, Proof
from adapters.models.kernels.interfaces.row_kernels import Delta, RowKernels
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import Batch, BlockBatch

T = TypeVar("T")

# Forwards on a GPU with up to this many rows share scratch memory of the kernels, whatever their buckets. A wider one
# shares only the weights with them, so it may run at the same time as one of them.
NARROW = 128
# Forwards on a GPU with up to this many rows may use other kernels and graphs if each row is in a slot of its own.
ALONE = 4


@frozen
class Rope:
    """Rotary tables, float32 `[capacity, n]` each, row p for position p, built once on the host in float32.

    n is half of what is rotated: hd / 2, or less where only the first 2 n numbers of a head are rotated. query_scale:
    float32 `[capacity]`, with which the caller of the kernels multiplies rotated queries; None: with nothing.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


@frozen(eq=False)
class HeadPrep:
    """The preparation of projected heads before they are rotated: a bias, then RMSNorm of each head. None: no such
    step.

    bias: one number for each output of the projection, those of values included. q_norm, k_norm: `[hd]`, in the
    model's dtype or in float32. A model has both norms or neither. v_norm: values are normed as well, and multiplied
    with no weight; only where keys are normed.
    """

    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    v_norm: bool = False


@frozen(eq=False)
class WholeLayer:
    """A whole layer of attention with a dense feed-forward, as `Kernels.fuse_layers` takes it.

    Norms, packed weights and caches are as the operations take them. width: columns of queries, keys and values in
    the projection. before: `[R, D]`, where the residual stream is left as it enters the layer, or None. mask: what
    rows of blocks see; all other rows see the keys up to themselves.
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
class ContextLayer:
    """A draft layer's part in context rows: the packed weight of keys and values, and the caches for them."""

    kv: Any
    prep: HeadPrep
    k_cache: Tensor
    v_cache: Tensor


class FusedContext(Protocol):
    """The context rows of a draft in every layer in one call, for steps of one bucket."""

    def run(self, given: Tensor, batch: Batch) -> None:
        """Compute the rows. given: `[R, K D]`, what the target's auxiliary layers left of the rows, side by side."""
        ...


@frozen(eq=False)
class ContextPass:
    """A draft's context rows for steps of one bucket. given: `[R, K D]`, the static tensor that they are made from."""

    context: FusedContext
    batch: Batch
    given: Tensor


class Kernels(RowKernels, Protocol):
    """Fused operations on one device, all in the model's dtype unless said otherwise. One instance serves one shard.

    Shapes: R bucket, D hidden, H query heads, KV key/value heads (H a multiple of KV), hd head size, I intermediate.
    Caches of one layer: `[slots, KV, capacity, hd]`, zeroed at start, so what is masked is always finite.
    """

    @property
    def name(self) -> str:
        """The name of the implementation in the numerics class. It changes whenever its bits may change."""
        ...

    @property
    def is_paged(self) -> bool:
        """True if rows can be read and written wherever `Batch.pages` places them. Otherwise a slot's rows are
        contiguous.
        """
        ...

    @property
    def packs_experts(self) -> bool:
        """True if experts stay packed as other weights do. Otherwise they are unpacked as they are loaded."""
        ...

    @property
    def kv_tile(self) -> int:
        """Keys are read in tiles of this many at absolute positions. The caches' capacity is a multiple of it."""
        ...

    @property
    def delta(self) -> DeltaKernels | None:
        """The operations of recurrent layers; None where there are none for the device."""
        ...

    @property
    def bit_signature(self) -> tuple[object, ...]:
        """All parts of the plan that bits depend on; empty where there is no plan."""
        ...

    def copy_for_shard(self) -> Kernels:
        """Return the same kernels for another shard, without anything that was recorded or kept for this one."""
        ...

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:
        """Multiply in every shape of the list and return which shapes agree. Kernels that never cut a sum have no
        plan.

        known: what kernels of this kind were proven for here before, which is not multiplied again.
        """
        ...

    def with_plan(self, plan: ProductPlan | None) -> Kernels:
        """Return new kernels that run in the shapes of a plan and in no other."""
        ...

    def pack(self, weight: Tensor | StackedWeight) -> Any:
        """Pack `[N, K]` on the device in the form that `linear` reads fastest; the caller may drop `weight`
        afterwards.

        Packed parts of a stack stay packed where there are products for them, proven ones where proofs are needed.
        """
        ...

    def pack_router(self, weight: Tensor) -> Any:
        """Pack the weight by which experts are chosen, for `linear`. Its sums may have an order of their own."""
        ...

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """Multiply `[R, K]`: x @ weight.T, `[R, N]`, accumulated in float32 and rounded once."""
        ...

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Prepare and rotate projected heads, write keys and values to the caches, and return queries `[R, H, hd]`.

        qkv: `[R, (H + 2 KV) hd]`, rows laid out `q heads | k heads | v heads`; they may be columns of a wider tensor.
        Heads go through `prep`, then q and k through half-split rotary at each row's position, over as much of the
        head as the tables cover. k and v are written at (slot, position). The returned q may be laid out in whatever
        form `attend` reads fastest.

        If both caches are one tensor, rows have no values of their own: they are laid out `q heads | k heads`.
        """
        ...

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        """Prepare, rotate and write keys and values of rows that have no queries, such as a draft's context rows.

        kv: `[R, 2 KV hd]`, rows laid out `k heads | v heads`. A bias has one number for each of these outputs.
        """
        ...

    def rotate_queries(self, q: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor) -> Tensor:
        """Return queries as `rotate_store` does, of rows `[R, H hd]` that have no keys of their own.

        They attend to the keys of another layer. k_cache: its keys.
        """
        ...

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rule: AttentionRule = PLAIN) -> Tensor:
        """Return causal attention, `[R, H * size of a value]`, with scale hd ** -0.5.

        The row at position p of slot s sees keys `[0, p]` of s, as far as `rule` does not say otherwise.

        Query head h reads key head `h // (H / KV)`. A row's bits may depend on its own keys only, so tiles start at
        absolute positions, and keys that the row does not see contribute exact zeros. The rows of q may be some of
        those that `rotate_store` returned, in a batch of their own.
        """
        ...

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask, latent: int = 0
    ) -> Tensor:
        """Return attention of a draft's blocks over their context and themselves, as `mask` says.

        It is `[R, H * size of a value]`. latent: as in `AttentionRule`.

        The blocks' own keys and values are in the caches at their positions. Only rows of a cache that the block may
        see have an influence. A block's bits depend on what it sees, its positions and its size.
        """
        ...

    def pack_gated(self, weight: Tensor | StackedWeight, activation: str = SILU) -> Any:
        """Pack `[2 I, K]`, rows laid out `gate | up`, in the form that `gated_linear` reads fastest. A GPU
        interleaves the two. activation: of the gate, one of `built_in_gates`.
        """
        ...

    def gated_linear(self, x: Tensor, packed: Any) -> Tensor:
        """Multiply x `[R, K]`: activation(gate) * up, `[R, I]`. Where it rounds on the way is left open.

        It is one operation, so that a device can finish the product before it leaves the registers.
        """
        ...

    def pack_heads(self, weight: Tensor) -> Any:
        """Pack a weight for each head, `[H, N, K]`, in the form that `multiply_heads` reads fastest."""
        ...

    def multiply_heads(self, x: Tensor, packed: Any) -> Tensor:
        """Multiply the heads of x `[R, H, K]`, each with its own weight: `[R, H, N]`, with the sums of `linear`."""
        ...

    def stack_experts(self, experts: Iterable[GatedWeights], count: int) -> EveryExpert:
        """Return the `count` experts of a layer in the form that `experts` reads fastest. Each is read once, and
        dropped if it is copied.
        """
        ...

    def experts(self, x: Tensor, experts: Experts, batch: Batch, deciding: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each row's experts, `[R, D]`, of x `[R, D]`; padded rows may be zeros.

        deciding: `[R, D]`, what the router reads in place of x. A row's bits depend neither on other rows' experts nor
        on how many rows an expert has.
        """
        ...

    def experts_late(self, x: Tensor, experts: Experts, batch: Batch) -> Delta:
        """Do what `experts` does, but the sum may be left to the `add_norm` that gets it, with the same bits."""
        ...

    def fuse_layers(
        self, layers: Sequence[WholeLayer], rope: Rope, rows: int, embedding: Embedding | None
    ) -> FusedLayers | None:
        """Return layers that one call carries out in steps of this many rows, or None where there is no such call.

        The bits are those of the operations one by one. embedding: of the first layer of a model.
        """
        ...

    def fuse_context(
        self, fc: Any, norm: Tensor, eps: float, layers: Sequence[ContextLayer], rope: Rope, rows: int
    ) -> FusedContext | None:
        """Return a draft's context in one call: `linear` with `fc`, `add_norm`, and for each layer `linear` and
        `store`.
        """
        ...

    def build_pass(
        self,
        layers: FusedLayers,
        ending: tuple[Tensor, float, Any],
        batch: Batch,
        forward: Forward,
        logits: Tensor,
    ) -> DecodePass | None:
        """Return a whole model for steps of one bucket: fused layers and the head behind them.

        ending: the final norm, its eps, and the packed head. forward, logits: the static tensors of the bucket. None
        where these kernels have no such call, or it does not serve these weights or this many rows.
        """
        ...

    def build_draft_pass(
        self, block: DecodePass, contexts: Sequence[ContextPass], left: Sequence[Tensor], mask: int
    ) -> DraftPass | None:
        """Return a draft's part of decode steps. contexts: by rows, ascending.

        left: what the target leaves for the draft of each layer that it reads, `[R, D]`. mask: the token of rows that
        are to be proposed. None as in `build_pass`.
        """
        ...

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        """Copy the rows `tokens`, `[R]`, of table `[V, D]` to out `[R, D]`, and return it.

        The table may lie in pinned host memory, which a GPU reads without the host's help.
        """
        ...

    def write_logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: Any, out: Tensor) -> None:
        """Compute float32 logits `[R, V]` into out: `linear` of the `add_norm` of hidden `[R, D]`."""
        ...

    def prepare_step(self, batch: Batch) -> None:
        """Do host work that all layers share. Called once a forward, after `batch.load` and before `launch`."""
        ...

    def launch(self, name: str, batch: Batch, body: Callable[[], T], *, piece: str = "") -> T:
        """Run `body`, a fixed sequence of kernel calls over static buffers that never waits for the device.

        A plain implementation calls it. One that records graphs captures it on first use for (name, bucket) and
        replays it later. The tensors that `body` returned then belong to the graph and are filled again each time.
        piece: which part this is of a body that is launched in several.
        """
        ...

    def stop_recording(self) -> None:
        """Record and replay no graphs from now on, because a body waits for the device."""
        ...
