"""CPU kernels: products of our own and oneDNN's, of weights and in attention, called so that a row never sees its
bucket.

What makes a row's bits its own:
* a product runs with a number of rows that was proven to agree with all others that are used (`proof.py`): a step of
  more rows is multiplied in pieces, one of fewer is padded; how oneDNN cuts a sum differs with the row count, the
  processor and the threads;
* where products of our own are installed, what happens to rows between products is in C with them (`native/rows.py`);
* activations run inside the product, whose vector tails are masked; an ATen elementwise loop may end in scalar code,
  so outside of both only correctly rounded operations (+, *, /, sqrt, casts) touch the rows, and softmax over rows of
  whole vectors;
* attention is made of such products, too (`cpu_attention.py`).

Without a plan nothing is cut, padded or promised: that is for tests and for the proof itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, Stack
from adapters.models.kernels.cpu import onednn
from adapters.models.kernels.cpu.attention import CpuAttention, StepPlan
from adapters.models.kernels.cpu.delta import CpuDelta
from adapters.models.kernels.cpu.layers import context_at_once, head_at_once, layers_at_once
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.delta import NativeDelta
from adapters.models.kernels.cpu.native.delta import fits as has_room_for
from adapters.models.kernels.cpu.native.library import compiled
from adapters.models.kernels.cpu.native.norm_and_head import NativeHead
from adapters.models.kernels.cpu.native.products import FORMS, NativePacked, NativeProducts, NativeWeight
from adapters.models.kernels.cpu.native.rows import NativeRows, PreparedHeads
from adapters.models.kernels.cpu.packed import CpuPacking, CpuStack, CpuWeight, check_rows
from adapters.models.kernels.cpu.thread_tuning import ThreadTuning
from adapters.models.kernels.delta_interface import DeltaKernels, DeltaShape
from adapters.models.kernels.experts_interface import Experts, experts_feed, one_by_one
from adapters.models.kernels.interface import (
    AttentionMask,
    ContextAtOnce,
    ContextLayer,
    Embedding,
    HeadPrep,
    LayersAtOnce,
    Rope,
    WholeLayer,
)
from adapters.models.kernels.multiplier import dtype_name
from adapters.models.kernels.product_list import NARROW, NATIVE, TILE, ProductPlan, Products, Proof, Unproven
from adapters.models.kernels.proof.prover import prove
from adapters.models.kernels.row_format import form_of
from adapters.models.kernels.step_batch import Batch, BlockBatch

T = TypeVar("T")

# oneDNN's AMX kernels read 16-bit inputs in blocks of so many; in what lies past the end of one a NaN would spread.
_COLUMNS = 32


class CpuKernels:
    """Keeps only what the steps of one shard share; the weights are the shard's.

    plan: in which shapes products run; a product that is not in it raises Unproven. own: products of our own, where
    this installation has them.
    """

    kv_tile = TILE
    paged, packs_experts = False, True
    stacked = staticmethod(one_by_one)

    def __init__(self, dtype: torch.dtype, plan: ProductPlan | None = None, *, own: bool = True) -> None:
        self._dtype, self._plan = dtype, plan
        found = compiled() if own else None
        fits = found is not None and dtype in FORMS
        self._native = None if found is None else NativeProducts(found, found.serving, dtype if fits else None)
        self._packed = None if self._native is None else CpuPacking(self._native, plan)
        self._rows = NativeRows(found, found.serving) if found is not None and fits else None
        self._paces: dict[tuple[str, int], ThreadTuning] = {}
        self._heads: dict[int, tuple[CpuWeight | CpuStack, NativeHead | None]] = {}  # by rows
        self._preps: dict[tuple[int, int], tuple[HeadPrep, PreparedHeads]] = {}
        self._own_attention = NativeAttention(found, found.serving, dtype) if found is not None and fits else None
        self._attention = CpuAttention(self, dtype, plan)
        self._own_rule = NativeDelta(found, found.serving) if found is not None and fits else None
        in_c = plan is None or all(served.way == NATIVE for served in plan.deltas)
        self.delta: DeltaKernels | None = self._own_rule if in_c and self._own_rule is not None else CpuDelta(plan)

    @property
    def name(self) -> str:
        native = "" if self._native is None else "native-"
        return f"{native}{'onednn' if onednn.ONEDNN else 'aten'}-{dtype_name(self._dtype)}"

    @property
    def numbers(self) -> tuple[object, ...]:
        return () if self._plan is None else self._plan.numbers()

    def fresh(self) -> CpuKernels:
        return self.using(self._plan)

    # --- products, in no particular pieces ---

    def dtypes(self) -> Sequence[torch.dtype]:
        own = [self._dtype] if onednn.multiplies(self._dtype) else []
        return tuple(dict.fromkeys([*own, torch.float32]))

    def ways(self, *, wider: bool) -> Sequence[str]:
        own = [NATIVE] if self._native is not None and (wider or self._dtype in FORMS) else []
        return [*own, *(dtype_name(dtype) for dtype in self.dtypes()[: 2 if wider else 1])]

    def rows_in(self, way: str) -> torch.dtype:
        if way == NATIVE:
            return self._dtype if self._dtype in FORMS else torch.float32
        return getattr(torch, way)

    def reorder(self, weight: Tensor, way: str) -> Tensor | NativeWeight:
        if way != NATIVE:
            return onednn.reorder(weight)
        if self._native is None:
            raise Unproven("a plan for products of our own, and this installation has none")
        return self._native.pack(weight)

    def pack_steps(self, matrix: PackedMatrix) -> NativePacked | None:
        return None if self._packed is None else self._packed.one(matrix)

    def multiply(self, x: Tensor, weight: Any) -> Tensor:
        if isinstance(weight, NativePacked) and self._native is not None:
            return self._native.multiply_packed(x, weight)
        return self._multiply_own(x, weight) if isinstance(weight, NativeWeight) else onednn.product(x, weight)

    def multiply_gated(self, x: Tensor, gate: Any, up: Any) -> Tensor:
        if isinstance(gate, NativePacked) and self._native is not None:
            return self._native.multiply_packed(x, gate, up)
        return self._multiply_own(x, gate, up) if isinstance(gate, NativeWeight) else onednn.gated_product(x, gate, up)

    def _multiply_own(self, x: Tensor, weight: NativeWeight, up: NativeWeight | None = None) -> Tensor:
        assert self._native is not None
        return self._native.multiply(x, weight, up)

    @property
    def own_attention(self) -> NativeAttention | None:
        return self._own_attention

    def own_rule(self, shape: DeltaShape) -> NativeDelta | None:
        return self._own_rule if has_room_for(shape) else None

    def batched_rule(self) -> CpuDelta:
        return CpuDelta(None)

    # --- what is proven of them ---

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:
        return prove(self, products, known)

    def using(self, plan: ProductPlan | None) -> CpuKernels:
        return CpuKernels(self._dtype, plan, own=self._native is not None)

    # --- weights ---

    def pack(self, weight: Tensor | Stack) -> CpuWeight | CpuStack:
        if isinstance(weight, Tensor):
            return self._pack(weight, gated=False)
        stack = None if self._packed is None else self._packed.stacked(weight, lambda one: self._pack(one, gated=False))
        return self._pack(weight.unpacked(), gated=False) if stack is None else stack

    def pack_gated(self, weight: Tensor | Stack) -> CpuWeight | CpuStack:
        if isinstance(weight, Tensor):
            return self._pack(*weight.chunk(2), gated=True)
        stack = None if self._packed is None else self._packed.gating(weight)
        return self._pack(*weight.unpacked().chunk(2), gated=True) if stack is None else stack

    def _pack(self, *weights: Tensor, gated: bool) -> CpuWeight:
        outputs, inputs = weights[0].shape
        way, pieces = self.ways(wider=True)[0], None
        if self._plan is not None:
            served = self._plan.weight(outputs, inputs, gated=gated)
            way = served.way
            if self._plan.steps:
                pieces = {rows: served.piece(rows) for rows in self._plan.steps}
        dtype = self.rows_in(way)
        whole = way == NATIVE or dtype is torch.float32
        columns = inputs if whole else -(-inputs // _COLUMNS) * _COLUMNS
        parts, spare = [weight.to(dtype) for weight in weights], columns - inputs
        wide = (torch.nn.functional.pad(part, (0, spare)) if spare else part for part in parts)
        return CpuWeight(tuple(self.reorder(weight.contiguous(), way) for weight in wide), dtype, columns, pieces)

    def linear(self, x: Tensor, packed: CpuWeight | CpuStack) -> Tensor:
        if isinstance(packed, CpuStack):
            check_rows(x, packed.steps)
            return packed.linear(x.to(self.rows_in(NATIVE)), lambda one: self.linear(x, one)).to(self._dtype)
        [weight] = packed.weights
        return self._in_pieces(x, packed, lambda rows: self.multiply(rows, weight))

    def gated(self, x: Tensor, packed: CpuWeight | CpuStack) -> Tensor:
        if isinstance(packed, CpuStack):
            check_rows(x, packed.steps)
            return packed.gated(x.to(self.rows_in(NATIVE))).to(self._dtype)
        gate, up = packed.weights
        return self._in_pieces(x, packed, lambda rows: self.multiply_gated(rows, gate, up))

    def experts(self, x: Tensor, experts: Experts, batch: Batch) -> Tensor:
        return experts_feed(self, x, experts, batch, self._padded)

    def _padded(self, rows: int) -> int:
        """The least row count of a step that so many rows fit into: products of such steps are proven."""
        steps = () if self._plan is None else self._plan.steps
        return next((count for count in steps if count >= rows), rows)

    def _in_pieces(self, x: Tensor, packed: CpuWeight, multiply: Callable[[Tensor], Tensor]) -> Tensor:
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

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if self._rows is not None:
            return self._rows.add_norm(residual, delta, weight, eps)
        if delta is not None:
            residual.add_(delta)
        return torch.rms_norm(residual.to(weight.dtype), weight.shape, weight, eps).to(residual.dtype)

    def at_once(
        self, layers: Sequence[WholeLayer], rope: Rope, rows: int, embedding: Embedding | None
    ) -> LayersAtOnce | None:
        if self._own_attention is None:
            return None
        native = self._own_attention.compiled
        found = layers_at_once(native, layers, rope, rows, self._dtype, embedding, self._prepared)
        return found if found is not None and self._attention.own_serves(*found.heads, rows) else None

    def context_at_once(
        self, fc: Any, norm: Tensor, eps: float, layers: Sequence[ContextLayer], rope: Rope, rows: int
    ) -> ContextAtOnce | None:
        if self._rows is None:
            return None
        return context_at_once(self._rows.compiled, (fc, norm, eps), layers, rope, rows, self._prepared)

    def logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: CpuWeight | CpuStack, out: Tensor) -> None:
        known, own = self._heads.get(rows := hidden.shape[0], (None, None))
        if known is not packed:
            own = None if self._rows is None else head_at_once(self._rows.compiled, norm, eps, packed, rows)
            self._heads[rows] = packed, own
        if own is None:
            out.copy_(self.linear(self.add_norm(hidden, None, norm, eps), packed))
        else:
            own.put(hidden, out)

    def prepare(self, batch: Batch) -> None:
        batch.plan = StepPlan(batch.segments)

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        kv, head = k_cache.shape[1], form_of(k_cache).head(k_cache.shape[3])
        queries = qkv.shape[1] // head - 2 * kv
        if self._rows is not None:
            q = self._own_heads(self._rows, qkv, prep, rope, batch, k_cache, v_cache)
            return q.view(batch.bucket, kv, queries // kv, head)
        rotated, values = self._rotated(qkv, prep, rope, batch, (queries, kv, head))
        batch.plan.write(rotated[:, queries:], values, k_cache, v_cache)
        return rotated[:, :queries].contiguous().view(batch.bucket, kv, queries // kv, head)

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        if self._rows is not None:
            self._own_heads(self._rows, kv, prep, rope, batch, k_cache, v_cache)
            return
        head = form_of(k_cache).head(k_cache.shape[3])
        keys, values = self._rotated(kv, prep, rope, batch, (0, k_cache.shape[1], head))
        batch.plan.write(keys, values, k_cache, v_cache)

    def _own_heads(
        self, own: NativeRows, x: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        slots, kv, capacity, width = k_cache.shape
        head = form_of(k_cache).head(width)
        batch.plan.check(slots, min(capacity, len(rope.cos)))
        heads = self._prepared(prep, (x.shape[1] // head - 2 * kv, kv, head))
        return own.prepare(x, heads, rope, (batch.slots, batch.positions), k_cache, v_cache)

    def _rotated(
        self, projected: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, float32 `[R, H + KV, hd]`, prepared and rotated to the rows' positions; and values.

        shape: H, KV and hd.
        """
        queries, kv, head = shape
        heads = projected.view(batch.bucket, queries + 2 * kv, head)
        how = self._prepared(prep, shape)
        if how.bias is not None:
            heads = heads.float() + how.bias
        turned, values = heads[:, :-kv].float(), heads[:, -kv:]
        if how.normed:
            turned = torch.rms_norm(turned, (head,), None, how.eps)
        turned = turned * how.weight
        cos, sin = batch.plan.angles(rope, batch)
        part = turned[..., : cos.shape[2]]
        swapped = torch.roll(part, part.shape[2] // 2, 2)
        part.mul_(cos).add_(swapped.mul_(sin))
        return turned, values

    def _prepared(self, prep: HeadPrep, shape: tuple[int, int, int]) -> PreparedHeads:
        """In float32: what queries and keys are multiplied with, attention's scale of q included; the bias `[H + 2 KV,
        hd]`. Kept with what it was made from, so that the identity stays taken.
        """
        queries, kv, head = shape
        found = self._preps.get((id(prep), queries))
        if found is None:
            one = torch.ones(head)
            q_norm, k_norm = (one if norm is None else norm.float() for norm in (prep.q_norm, prep.k_norm))
            scaled = q_norm * head**-0.5
            weight = torch.cat((scaled.expand(queries, -1), k_norm.expand(kv, -1)))
            bias = None if prep.bias is None else prep.bias.float().view(queries + 2 * kv, head)
            heads = PreparedHeads(bias, weight, prep.q_norm is not None, prep.eps)
            found = self._preps[id(prep), queries] = (prep, heads)
        return found[1]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        return self._attention.attend(q, k_cache, v_cache, batch)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask
    ) -> Tensor:
        return self._attention.attend_block(q, k_cache, v_cache, batch, mask)

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:
        if self._plan is None:
            return body()
        (narrow, wide), threads = self._plan.threads, torch.get_num_threads()
        if threads != wide:
            raise Unproven(f"products were proven for {wide} threads, and there are {threads} now")
        if batch.bucket > NARROW or narrow == wide:
            return body()
        pace = self._paces.get(kind := (name, batch.bucket)) or self._paces.setdefault(kind, ThreadTuning(narrow, wide))
        threads, start = pace.threads, time.perf_counter()
        if threads != wide:
            torch.set_num_threads(threads)
        try:
            return body()
        finally:
            if threads != wide:
                torch.set_num_threads(wide)
            pace.took(time.perf_counter() - start)
