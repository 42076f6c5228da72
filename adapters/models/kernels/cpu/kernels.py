"""Kernels for CPUs: products of the compiled library and of oneDNN, called so that no row's bits depend on its bucket.

Four rules make a row's bits its own:
* A product runs with a row count that was proven to agree with all others in use (`proof/`). A step with more rows is
  multiplied in pieces, one with fewer is padded. How oneDNN cuts a sum differs with rows, processor and threads.
* Where the compiled library is installed, it also does what happens to rows between products (`native/rows.py`).
* Activations run inside the product, whose vector tails are masked. An ATen elementwise loop may end in scalar code,
  so outside of products only correctly rounded operations touch the rows (+, *, /, sqrt, casts), and softmax over
  rows of whole vectors.
* Attention is made of such products as well (`attention.py`).

Without a plan nothing is cut, padded or promised: that is for tests and for the proof itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StackedWeight
from adapters.models.kernels.composed_operations import ComposedOperations
from adapters.models.kernels.cpu import layers as fused
from adapters.models.kernels.cpu import onednn
from adapters.models.kernels.cpu.attention import CpuAttention
from adapters.models.kernels.cpu.delta import CpuDelta
from adapters.models.kernels.cpu.experts import expect_experts, stack_experts, sum_cpu_experts
from adapters.models.kernels.cpu.heads import CpuHeads
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.delta import NativeDelta, has_room_for
from adapters.models.kernels.cpu.native.native_library import TILES, find_library
from adapters.models.kernels.cpu.native.norm_and_head import NativeHead
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, NativePacked, NativeProducts, NativeWeight
from adapters.models.kernels.cpu.native.rows import NativeRows
from adapters.models.kernels.cpu.packed import CpuPacking, CpuStack, CpuWeight, check_rows
from adapters.models.kernels.cpu.step_plan import StepPlan
from adapters.models.kernels.cpu.thread_tuning import ThreadTuning
from adapters.models.kernels.expert_sums import finish_experts
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.delta_interface import DeltaKernels, DeltaShape
from adapters.models.kernels.interfaces.experts_interface import Experts
from adapters.models.kernels.interfaces.fused_layers import Embedding, FusedLayers
from adapters.models.kernels.interfaces.layer_interface import (
    ContextLayer,
    ContextPass,
    FusedContext,
    HeadPrep,
    Rope,
    WholeLayer,
)
from adapters.models.kernels.interfaces.multiplier import dtype_name
from adapters.models.kernels.interfaces.product_list import (
    NARROW,
    NATIVE,
    TILE,
    ProductPlan,
    Products,
    Proof,
    UnprovenProductError,
)
from adapters.models.kernels.proof.prover import prove
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import Batch, BlockBatch

T = TypeVar("T")

# oneDNN's AMX kernels read 16-bit inputs in blocks of this many columns. A NaN past the end of a row would spread.
_COLUMNS = 32


class CpuKernels(ComposedOperations):
    """Implements `Kernels`. It keeps only what the steps of one shard share; the weights belong to the shard.

    plan: the shapes in which products run; a product that is not in it raises UnprovenProductError. own: use the
    compiled library where this installation has it.
    """

    kv_tile = TILE
    is_paged = False
    packs_experts = True
    stack_experts = staticmethod(stack_experts)

    def __init__(self, dtype: torch.dtype, plan: ProductPlan | None = None, *, own: bool = True) -> None:
        self._dtype = dtype
        self._plan = plan
        found = find_library() if own else None
        fits = found is not None and dtype in DTYPE_CODES
        self._native = None if found is None else NativeProducts(found, found.serving, dtype if fits else None)
        self._packed = None if self._native is None else CpuPacking(self._native, plan)
        self._rows = NativeRows(found, found.serving) if found is not None and fits else None
        self._tunings: dict[tuple[str, int], ThreadTuning] = {}
        self._logits_of: dict[int, tuple[CpuWeight | CpuStack, NativeHead | None]] = {}  # by rows
        self._heads = CpuHeads(self._rows)
        self._own_attention = NativeAttention(found, found.find_level(dtype), dtype) if found and fits else None
        self._attention = CpuAttention(self, dtype, plan)
        self._own_rule = NativeDelta(found, found.serving) if found is not None and fits else None
        in_c = plan is None or all(served.way == NATIVE for served in plan.deltas)
        self.delta: DeltaKernels | None = self._own_rule if in_c and self._own_rule is not None else CpuDelta(plan)

    @property
    def name(self) -> str:
        native = "" if self._native is None else f"{self._native.compiled.name_arithmetic(self._dtype)}-"
        return f"{native}{'onednn' if onednn.ONEDNN else 'aten'}-{dtype_name(self._dtype)}"

    @property
    def bit_signature(self) -> tuple[object, ...]:
        return () if self._plan is None else self._plan.bit_signature()

    @property
    def ignores_threads(self) -> bool:
        return self._plan is not None and self._plan.is_native

    def copy_for_shard(self) -> CpuKernels:
        return self.with_plan(self._plan)

    # --- products, in no particular pieces ---

    def attention_dtypes(self) -> Sequence[torch.dtype]:
        both = (self._dtype, torch.float32) if onednn.is_quick(self._dtype) else (torch.float32, self._dtype)
        return tuple(dict.fromkeys(filter(onednn.supports, both)))

    def ways(self, *, wider: bool) -> Sequence[str]:
        own = [NATIVE] if self._native is not None and (wider or self._dtype in DTYPE_CODES) else []
        found = self.attention_dtypes()
        return [*own, *map(dtype_name, found if wider or self._dtype not in found else [self._dtype])]

    @property
    def has_tiles(self) -> bool:
        return self._native is not None and self._native.compiled.find_level(self._dtype) >= TILES

    def operand_dtype(self, way: str) -> torch.dtype:
        if way == NATIVE:
            return self._dtype if self._dtype in DTYPE_CODES else torch.float32
        return getattr(torch, way)

    def reorder(self, weight: Tensor, way: str) -> Tensor | NativeWeight:
        if way != NATIVE:
            return onednn.reorder(weight)
        if self._native is None:
            raise UnprovenProductError("the plan wants products of the compiled library, which is not available here")
        return self._native.pack(weight)

    def pack_steps(self, matrix: PackedMatrix) -> NativePacked | None:
        return None if self._packed is None else self._packed.pack_matrix(matrix)

    def multiply(self, x: Tensor, weight: Any) -> Tensor:
        if isinstance(weight, NativePacked) and self._native is not None:
            return self._native.multiply_packed(x, weight)
        return self._multiply_native(x, weight) if isinstance(weight, NativeWeight) else onednn.multiply(x, weight)

    def multiply_gated(self, x: Tensor, gate: Any, up: Any) -> Tensor:
        if isinstance(gate, NativePacked) and self._native is not None:
            return self._native.multiply_packed(x, gate, up)
        return (
            self._multiply_native(x, gate, up) if isinstance(gate, NativeWeight) else onednn.multiply_gated(x, gate, up)
        )

    def _multiply_native(self, x: Tensor, weight: NativeWeight, up: NativeWeight | None = None) -> Tensor:
        assert self._native is not None
        return self._native.multiply(x, weight, up)

    @property
    def native_attention(self) -> NativeAttention | None:
        return self._own_attention

    def native_rule(self, shape: DeltaShape) -> NativeDelta | None:
        return self._own_rule if has_room_for(shape) else None

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:
        return prove(self, products, known)

    def with_plan(self, plan: ProductPlan | None) -> CpuKernels:
        return CpuKernels(self._dtype, plan, own=self._native is not None)

    # --- weights ---

    def pack(self, weight: Tensor | StackedWeight) -> CpuWeight | CpuStack:
        if isinstance(weight, Tensor):
            return self._pack(weight, gated=False)
        stack = (
            None if self._packed is None else self._packed.pack_stack(weight, lambda one: self._pack(one, gated=False))
        )
        return self._pack(weight.unpack(), gated=False) if stack is None else stack

    def _pack_gated(self, weight: Tensor | StackedWeight) -> CpuWeight | CpuStack:
        if isinstance(weight, Tensor):
            return self._pack(*weight.chunk(2), gated=True)
        stack = None if self._packed is None else self._packed.pack_gated(weight)
        return self._pack(*weight.unpack().chunk(2), gated=True) if stack is None else stack

    def _pack(self, *weights: Tensor, gated: bool) -> CpuWeight:
        outputs, inputs = weights[0].shape
        way = self.ways(wider=True)[0]
        pieces = None
        if self._plan is not None:
            served = self._plan.find_weight(outputs, inputs, gated=gated)
            way = served.way
            if self._plan.steps:
                pieces = {rows: served.piece_rows(rows) for rows in self._plan.steps}
        dtype = self.operand_dtype(way)
        whole = way == NATIVE or dtype is torch.float32
        columns = inputs if whole else -(-inputs // _COLUMNS) * _COLUMNS
        parts = [weight.to(dtype) for weight in weights]
        padding = columns - inputs
        wide = (torch.nn.functional.pad(part, (0, padding)) if padding else part for part in parts)
        return CpuWeight(tuple(self.reorder(weight.contiguous(), way) for weight in wide), dtype, columns, pieces)

    def linear(self, x: Tensor, packed: CpuWeight | CpuStack) -> Tensor:
        if isinstance(packed, CpuStack):
            check_rows(x, packed.steps)
            return packed.linear(x.to(self.operand_dtype(NATIVE)), lambda one: self.linear(x, one)).to(self._dtype)
        [weight] = packed.weights
        return self._multiply_in_pieces(x, packed, lambda rows: self.multiply(rows, weight))

    def gated_linear(self, x: Tensor, packed: CpuWeight | CpuStack) -> Tensor:
        if isinstance(packed, CpuStack):
            check_rows(x, packed.steps)
            return packed.gated_linear(x.to(self.operand_dtype(NATIVE))).to(self._dtype)
        gate, up = packed.weights
        return self._multiply_in_pieces(x, packed, lambda rows: self.multiply_gated(rows, gate, up))

    def pack_heads(self, weight: Tensor) -> tuple[CpuWeight, ...]:
        return tuple(self._pack(one, gated=False) for one in weight)

    def multiply_heads(self, x: Tensor, packed: Sequence[CpuWeight]) -> Tensor:
        heads = zip(x.transpose(0, 1).contiguous(), packed, strict=True)
        return torch.stack([self.linear(one, weight) for one, weight in heads], 1)

    def experts(self, x: Tensor, experts: Experts, batch: Batch, deciding: Tensor | None = None) -> Tensor:
        rows = sum(segment.count for segment in batch.segments)
        return finish_experts(self, x, experts, *self.sum_experts(x, experts, rows, deciding))

    def expect_experts(self) -> None:
        expect_experts(self._native)

    def sum_experts(
        self, x: Tensor, experts: Experts, rows: int, deciding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return sum_cpu_experts(self, self._native, x, experts, rows, self._pad_row_count, deciding=deciding)

    def _pad_row_count(self, rows: int) -> int:
        """Return the smallest row count of a step that holds this many rows: products of such steps are proven."""
        steps = () if self._plan is None else self._plan.steps
        return next((count for count in steps if count >= rows), rows)

    def _multiply_in_pieces(self, x: Tensor, packed: CpuWeight, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        rows, inputs = x.shape
        check_rows(x, packed.pieces)
        count = rows if packed.pieces is None else packed.pieces[rows]
        x = x.to(packed.dtype)
        if count == rows and packed.columns == inputs:
            return multiply(x).to(self._dtype)
        if count > rows or packed.columns > inputs:
            padded = x.new_zeros(max(count, rows), packed.columns)
            padded[:rows, :inputs] = x
            x = padded
        found = multiply(x) if len(x) == count else torch.cat([multiply(part) for part in torch.split(x, count)])
        return found[:rows].to(self._dtype)

    def _add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if self._rows is not None:
            return self._rows.add_norm(residual, delta, weight, eps)
        if delta is not None:
            residual.add_(delta)
        return torch.rms_norm(residual.to(weight.dtype), weight.shape, weight, eps).to(residual.dtype)

    def fuse_layers(
        self, layers: Sequence[WholeLayer], rope: Rope, rows: int, embedding: Embedding | None
    ) -> FusedLayers | None:
        if self._own_attention is None:
            return None
        native = self._own_attention.compiled
        found = fused.fuse_layers(native, layers, rope, rows, self._dtype, embedding, self._heads.prepared)
        return found if found is not None and self._attention.is_native(*found.attention_heads, rows) else None

    def fuse_context(
        self, fc: Any, norm: Tensor, eps: float, layers: Sequence[ContextLayer], rope: Rope, rows: int
    ) -> FusedContext | None:
        if self._rows is None:
            return None
        return fused.fuse_context(self._rows.compiled, (fc, norm, eps), layers, rope, rows, self._heads.prepared)

    def build_pass(
        self,
        layers: FusedLayers,
        ending: tuple[Tensor, float, CpuWeight | CpuStack],
        batch: Batch,
        forward: Forward,
        logits: Tensor,
    ) -> DecodePass | None:
        return fused.build_pass(layers, ending, batch, forward, logits, self.launch)

    def build_draft_pass(
        self, block: DecodePass, contexts: Sequence[ContextPass], left: Sequence[Tensor], mask: int
    ) -> DraftPass | None:
        return fused.build_draft_pass(block, contexts, left, mask)

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(table, 0, tokens, out=out)

    def write_logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: CpuWeight | CpuStack, out: Tensor) -> None:
        known, own = self._logits_of.get(rows := hidden.shape[0], (None, None))
        if known is not packed:
            own = None if self._rows is None else fused.fuse_head(self._rows.compiled, norm, eps, packed, rows)
            self._logits_of[rows] = packed, own
        if own is None:
            out.copy_(self.linear(self.add_norm(hidden, None, norm, eps), packed))
        else:
            own.write_logits(hidden, out)

    def prepare_step(self, batch: Batch) -> None:
        batch.plan = StepPlan(batch.segments)

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        return self._heads.rotate_store(qkv, prep, rope, batch, k_cache, v_cache)

    def rotate_queries(self, q: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor) -> Tensor:
        return self._heads.rotate_queries(q, prep, rope, batch, k_cache)

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        self._heads.store(kv, prep, rope, batch, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rule: AttentionRule = PLAIN) -> Tensor:
        return self._attention.attend(q, k_cache, v_cache, batch, rule)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask, latent: int = 0
    ) -> Tensor:
        return self._attention.attend_block(q, k_cache, v_cache, batch, mask, latent)

    def launch(self, name: str, batch: Batch, body: Callable[[], T], *, piece: str = "") -> T:
        if self._plan is None:
            return body()
        narrow, wide = self._plan.threads
        if (threads := torch.get_num_threads()) != wide:
            raise UnprovenProductError(f"products were proven for {wide} threads, and there are {threads} now")
        if batch.bucket > NARROW or narrow == wide:
            return body()
        kind = (name + piece, batch.bucket)
        if kind not in self._tunings:
            self._tunings[kind] = ThreadTuning(narrow, wide)
        return self._tunings[kind].run(body)

    def stop_recording(self) -> None:
        """Nothing is ever recorded."""
