"""CUDA kernels of the decoder layer: Triton programs whose bits do not depend on the bucket, the row or its
neighbours.

This module launches; `triton/` says what is computed and why its order is fixed. Attention's launches are in
`attention.py`, those of products in `products.py` and `packed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from attrs import define, evolve, field
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.activations import GATES, GELU, SILU
from adapters.models.kernels.cuda.attention import CudaAttention
from adapters.models.kernels.cuda.cuda_graphs import GraphCache
from adapters.models.kernels.cuda.delta import CudaDelta
from adapters.models.kernels.cuda.descriptors import LaunchArguments, cache_sizes, launch_options, page_size
from adapters.models.kernels.cuda.device_traits import DeviceTraits, read_traits
from adapters.models.kernels.cuda.experts import CudaExperts
from adapters.models.kernels.cuda.packed import CudaPacking, CudaStack
from adapters.models.kernels.cuda.packed_rows import are_usual, keep_heads, scales_of
from adapters.models.kernels.cuda.products import CudaProducts
from adapters.models.kernels.cuda.row_launches import add_norm, add_normed, apply_gate
from adapters.models.kernels.cuda.rows.row_experts import RowExperts
from adapters.models.kernels.cuda.step_tiles import StepTiles
from adapters.models.kernels.cuda.tiles import KV_TILE, choose_piece, count_parts, round_up_to_power
from adapters.models.kernels.cuda.weights import CudaWeight, can_be_grouped, describe_form
from adapters.models.kernels.expert_sums import run_experts
from adapters.models.kernels.formats.row_format import LIMITS, as_bytes, format_of
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.experts_interface import (
    ChosenExperts,
    EveryExpert,
    Experts,
    GatedWeights,
    StackedExperts,
)
from adapters.models.kernels.interfaces.fused_layers import FusedLayers
from adapters.models.kernels.interfaces.layer_interface import NARROW, FusedContext, HeadPrep, Rope
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, Proof
from adapters.models.kernels.interfaces.row_kernels import Delta, NormedRows
from adapters.models.kernels.offload import list_tensors, map_tensors
from adapters.models.kernels.step_batch import Batch, BlockBatch, StateBatch
from adapters.models.kernels.triton import rows
from adapters.models.kernels.triton_launch import launch

T = TypeVar("T")

HEAD_SIZES = (16, 32, 64, 128, 256, 512)


def _pad_row_count(rows: int) -> int:
    """Pad the rows of an expert: up to NARROW one tile holds them all, and a tile's rows are a power of two."""
    return round_up_to_power(rows) if rows <= NARROW else rows


@define(eq=False)
class TritonKernels:
    """`Kernels` for one CUDA device.

    pdl: let a kernel start while the one before it drains; the default is wherever the device can. Bits are the same
    either way. traits: of the device; the default is to ask it.
    """

    device: torch.device
    pdl: bool | None = None
    traits: DeviceTraits = field()
    graphs: GraphCache = field(init=False)
    _attention: CudaAttention = field(init=False)
    grouped_experts: CudaExperts = field(init=False)
    products: CudaProducts = field(init=False)
    _packing: CudaPacking = field(init=False)
    _row_experts: RowExperts = field(init=False)

    name = "triton-5"
    kv_tile = KV_TILE
    is_paged = True
    packs_experts = True
    built_in_gates: Collection[str] = frozenset((SILU, GELU))
    delta: CudaDelta = field(init=False)

    @traits.default
    def _read_traits(self) -> DeviceTraits:
        return read_traits(self.device)

    def __attrs_post_init__(self) -> None:
        self.graphs = GraphCache(self.device)
        traits = self.traits
        can = traits.capability
        self.pdl = can.overlaps_launches if self.pdl is None else self.pdl
        self.delta = CudaDelta(self.device, self.pdl, can.has_hopper_kernels)
        own = (traits.processors, traits.shared, self.pdl)
        self._attention = CudaAttention(self.device, *own, can.has_hopper_kernels)
        self.products = CudaProducts(*own, can.has_hopper_kernels, can.takes_plain_pointers)
        self._packing = CudaPacking(self.device, *own, can.converts_e4m3, can.has_hopper_kernels)
        self.grouped_experts = CudaExperts(*own, can.takes_plain_pointers, can.has_hopper_kernels)
        self._row_experts = RowExperts(*own, can.has_hopper_kernels)

    @property
    def bit_signature(self) -> tuple[object, ...]:
        return ()

    def copy_for_shard(self) -> TritonKernels:
        return TritonKernels(self.device, self.pdl, self.traits)

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:  # noqa: ARG002
        """Every element is one chain over ascending K, or chains of pieces that follow from the weight's shape.

        Both are so at every row count. The probe's whole layer is the proof.
        """
        return Proof(None)

    def with_plan(self, plan: ProductPlan | None) -> TritonKernels:  # noqa: ARG002
        return self.copy_for_shard()

    def pack(self, weight: Tensor | StackedWeight) -> CudaWeight | CudaStack:
        if isinstance(weight, StackedWeight):
            return self._packing.pack_stack(weight, self._pack) or self._pack(weight.unpack())
        return self._pack(weight)

    def _pack(self, weight: Tensor) -> CudaWeight:
        if weight.shape[-1] * weight.element_size() % 16:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} cannot be used on CUDA: a row must be a multiple of 16 bytes"
            )
        return CudaWeight(weight.contiguous())

    def pack_gated(self, weight: Tensor | StackedWeight, activation: str = SILU) -> CudaWeight | CudaStack:
        assert activation in self.built_in_gates
        if isinstance(weight, StackedWeight):
            return self._packing.pack_gated(weight, activation) or self.pack_gated(weight.unpack(), activation)
        gate, up = weight.chunk(2)
        return CudaWeight(self._pack(torch.stack((gate, up), 1).flatten(0, 1)).weight, GATES[activation])

    def pack_router(self, weight: Tensor) -> CudaWeight:
        return evolve(self._pack(weight), piece=choose_piece(weight.shape[1], weight.dtype))

    def linear(self, x: Tensor, packed: CudaWeight | CudaStack) -> Tensor:
        if isinstance(packed, CudaStack):
            return self._packing.multiply(x, packed, self.products.multiply)
        columns = packed.weight.shape[0]
        out = x.new_empty(x.shape[0], columns // 2 if packed.gated else columns)
        if packed.piece:
            self.products.route(x, packed.weight, out, packed.piece)
        else:
            self.products.multiply(x, packed.weight, out, gated=packed.gated)
        return out

    def gated_linear(self, x: Tensor, packed: CudaWeight | CudaStack) -> Tensor:
        return self.linear(x, packed)

    def apply_gate(self, activation: str, both: Tensor, bias: Tensor | None) -> Tensor:
        return apply_gate(activation, both, bias, None, self.pdl)

    def stack_experts(self, experts: Iterable[GatedWeights], count: int) -> EveryExpert:
        """Copy one expert after the other, so that no more than one is in memory twice.

        Experts that are packed in several ways are not stacked. Each of their products is a launch of its own.
        """
        rest = iter(experts)
        first = next(rest)
        if not can_be_grouped(first):
            return (first, *rest)
        form = describe_form(first)
        stack = map_tensors(first, lambda part: part.new_empty(count, *part.shape))
        for number, weights in enumerate(chain((first,), rest)):
            if describe_form(weights) != form:
                stacked = StackedExperts(stack)
                return (*(stacked[before] for before in range(number)), weights, *rest)
            for target, source in zip(list_tensors(stack), list_tensors(weights), strict=True):
                target[number].copy_(source)
        return StackedExperts(stack)

    def pack_heads(self, weight: Tensor) -> CudaWeight:
        return self._pack(weight)

    def multiply_heads(self, x: Tensor, packed: CudaWeight) -> Tensor:
        return self.grouped_experts.multiply_heads(x, packed.weight)

    def experts(self, x: Tensor, experts: Experts, batch: Batch, deciding: Tensor | None = None) -> Tensor:
        """Run a layer of experts. No graph is recorded where the host has to know the router's choice."""
        each = experts.each
        if isinstance(each, StackedExperts):
            return self.grouped_experts.run_experts(self, x, experts, each.weights, batch, deciding)
        self.stop_recording()
        weights = each.stacked.weights if isinstance(each, ChosenExperts) else None
        if weights is not None and can_be_grouped(weights) and weights.down_bias is None:
            return self.grouped_experts.run_experts(self, x, experts, weights, batch, deciding)
        return run_experts(self, x, experts, batch, _pad_row_count, deciding=deciding)

    def experts_late(self, x: Tensor, experts: Experts, batch: Batch) -> Delta:
        if self._row_experts.are_served(x, experts):
            return self._row_experts.run(self, x, experts, batch)
        if isinstance(experts.each, StackedExperts):
            return self.grouped_experts.run_late(self, x, experts, experts.each.weights, batch)
        return self.experts(x, experts, batch)

    def _options(self, warps: int) -> LaunchArguments:
        return launch_options(warps, self.pdl)

    def add_norm(
        self, residual: Tensor, delta: Delta | None, weight: Tensor, eps: float, *, bias: Tensor | None = None
    ) -> Tensor:
        return add_norm(residual, delta, weight, eps, bias=bias, pdl=self.pdl)

    def add_normed(self, residual: Tensor, delta: NormedRows, eps: float, outer: Sequence[Tensor] = ()) -> list[Tensor]:
        return add_normed(residual, delta, eps, outer, self.pdl)

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        return self._rotate(qkv, prep, rope, batch, (k_cache, v_cache), cache_sizes(k_cache, batch)[1])

    def rotate_queries(self, q: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor) -> Tensor:
        return self._rotate(q, prep, rope, batch, (k_cache, k_cache), 0)

    def _rotate(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, caches: tuple[Tensor, Tensor], kv: int
    ) -> Tensor:
        """Prepare and rotate heads of queries, and `kv` heads of keys and of values, which are written.

        Caches that are one tensor take the keys alone.
        """
        k_cache, v_cache = caches
        form = format_of(k_cache)
        head = form.head_size(k_cache.shape[3])
        coded = form.is_coded
        rotated = 2 * rope.cos.shape[1]
        is_shared = kv > 0 and v_cache is k_cache
        values = 0 if is_shared else kv
        if not {*((rotated, head - rotated) if is_shared else (head,))}.issubset(HEAD_SIZES):
            raise ValueError(f"head_dim {head} is not supported on CUDA; accepted: {', '.join(map(str, HEAD_SIZES))}")
        heads = qkv.shape[1] // head - kv - values  # none, if rows are only stored
        aside = not are_usual(k_cache, v_cache)
        left = heads + kv + values if aside else heads
        q = qkv.new_empty(len(qkv), left, head)
        at_once = 8
        grid = (len(qkv), count_parts(heads + kv + values, at_once))
        norm = prep.q_norm if prep.k_norm is None else prep.k_norm
        bias, q_norm, k_norm = (rope.cos if one is None else one for one in (prep.bias, prep.q_norm, norm))
        launch(
            rows.rotate_store,
            grid,
            qkv,
            bias,  # where there is none, some address that is never read
            q_norm,
            k_norm,
            rope.cos,
            rope.sin,
            batch.slots,
            batch.positions,
            q,
            *(as_bytes(cache) for cache in caches),
            *(scales_of(cache) for cache in caches),
            batch.positions if batch.pages is None else batch.pages,  # never read without
            qkv.stride(0),
            cache_sizes(k_cache, batch)[2],
            prep.eps,
            HEADS=heads,
            KV=kv,
            VALUES=values,
            HALF=rotated // 2,
            REST=head - rotated,
            PADDED=round_up_to_power(head - rotated),
            HAS_BIAS=prep.bias is not None,
            HAS_NORM=norm is not None,
            V_NORM=prep.v_norm,
            WIDE=norm is not None and norm.dtype != qkv.dtype,
            BLOCK=at_once,
            PAGE=page_size(k_cache, batch),
            LIMIT=0.0 if aside else LIMITS.get(form.dtype, 0.0),
            LEFT=left,
            enable_fp_fusion=not coded,  # so that codes are those that torch makes
            **self._options(4),
        )
        return keep_heads(q, batch, k_cache, v_cache, heads, kv, self.pdl) if aside else q

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        self.rotate_store(kv, prep, rope, batch, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rule: AttentionRule = PLAIN) -> Tensor:
        return self._attention.attend(q, k_cache, v_cache, batch, rule)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask, latent: int = 0
    ) -> Tensor:
        return self._attention.attend_block(q, k_cache, v_cache, batch, mask, latent)

    def fuse_layers(self, *_: object) -> FusedLayers | None:
        return None

    def fuse_context(self, *_: object) -> FusedContext | None:
        return None

    def build_pass(self, *_: object) -> DecodePass | None:
        return None

    def build_draft_pass(self, *_: object) -> DraftPass | None:
        return None

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        if table.device == out.device:
            return torch.index_select(table, 0, tokens, out=out)
        launch(rows.gather, (len(tokens),), table, tokens, out, table.shape[1], BLOCK=1024, num_warps=4)
        return out

    def write_logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: Any, out: Tensor) -> None:
        x = self.add_norm(hidden, None, norm, eps)
        if isinstance(packed, CudaWeight) and not (packed.gated or packed.piece) and self.products.can_widen(x):
            self.products.multiply(x, packed.weight, out, gated=0)
        else:
            out.copy_(self.linear(x, packed))

    def prepare_step(self, batch: Batch) -> None:
        if batch.plan is None:
            batch.plan = StepTiles()
        batch.plan.fresh.clear()
        batch.plan.merges = self._attention.merges_in_kernel(batch)
        batch.plan.unpacks = self._attention.unpacks_codes(batch)
        batch.plan.apart = self._attention.attends_apart(batch)

    def launch(self, name: str, batch: Batch, body: Callable[[], T], *, piece: str = "") -> T:
        def run_planned() -> T:
            batch.plan.fresh.clear()
            self._attention.planner.running = name
            if isinstance(batch, StateBatch):
                self.delta.begin_body(name, batch)
            if name in self._attention.planner.planned_bodies:
                self._attention.planner.plan_step(batch)
            return body()

        if batch.plan is None:  # logits of rows that another bucket has computed
            batch.plan = StepTiles()
        merges = batch.plan.merges = batch.plan.merges and name in self._attention.planner.planned_bodies
        shares_memory = bool(piece) or name in ("held", "mixed")  # these run on one thread only, one after the other
        key = (name, piece, batch.bucket, merges, batch.plan.unpacks, batch.plan.apart)
        return self.graphs.run(key, run_planned, shares_memory=shares_memory)

    def stop_recording(self) -> None:
        self.graphs.enabled = False
