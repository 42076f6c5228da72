"""Plain torch kernels for any device: slow, short and obviously right. The oracle of the fast ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.delta_interface import DeltaKernels
from adapters.models.kernels.experts_interface import Experts, list_experts, run_experts
from adapters.models.kernels.interface import AttentionMask, FusedContext, FusedLayers, HeadPrep, Rope
from adapters.models.kernels.product_list import ProductPlan, Products, Proof
from adapters.models.kernels.reference.delta import ReferenceDelta
from adapters.models.kernels.row_format import format_of
from adapters.models.kernels.step_batch import Batch, BlockBatch
from effects.ids import PAGE

T = TypeVar("T")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x times weight. A float32 weight is multiplied in float32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 n numbers of each head, half-split, in float32, rounded once.

    x: `[R, heads, hd]`. cos, sin: float32 `[R, 1, n]`.
    """
    size = cos.shape[-1]
    first = x[..., :size].float()
    second = x[..., size : 2 * size].float()
    rest = x[..., 2 * size :].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def read_rows(cache: Tensor, batch: Batch, slot: int, stop: int) -> Tensor:
    """Return the rows of a slot up to `stop`, `[KV, stop, hd]`, whether or not they are paged."""
    if batch.pages is None:
        return cache[slot, :, :stop]
    pages = batch.pages[slot, : -(-stop // PAGE)].long()
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :stop]


class ReferenceKernels:
    """Reads `batch.segments` on the host, so it cannot be recorded as a graph, and makes no promise about bits."""

    name = "reference"
    kv_tile = 64
    is_paged = False  # as an oracle is used; rows are read in both ways
    packs_experts = False
    delta: DeltaKernels | None = ReferenceDelta()
    stack_experts = staticmethod(list_experts)

    @property
    def bit_signature(self) -> tuple[object, ...]:
        return ()

    def copy_for_shard(self) -> ReferenceKernels:
        return ReferenceKernels()

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:  # noqa: ARG002
        return Proof(None)

    def with_plan(self, plan: ProductPlan | None) -> ReferenceKernels:  # noqa: ARG002
        return self.copy_for_shard()

    def pack(self, weight: Tensor | StackedWeight) -> Tensor:
        return weight.unpack() if isinstance(weight, StackedWeight) else weight

    def linear(self, x: Tensor, packed: Tensor) -> Tensor:
        return (x.float() @ packed.float().T).to(x.dtype)

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            residual += delta
        return rms_norm(residual, weight, eps)

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        form = format_of(k_cache)
        kv = k_cache.shape[1]
        head = form.head_size(k_cache.shape[3])
        biased = qkv if prep.bias is None else (qkv.float() + prep.bias.float()).to(qkv.dtype)
        heads = biased.reshape(len(qkv), qkv.shape[1] // head, head)
        q = heads[:, : -2 * kv]
        k = heads[:, -2 * kv : -kv]
        v = heads[:, -kv:]
        if prep.q_norm is not None and prep.k_norm is not None:
            q = rms_norm(q, prep.q_norm, prep.eps)
            k = rms_norm(k, prep.k_norm, prep.eps)
        at = batch.positions.clamp(min=0)
        cos = rope.cos[at].unsqueeze(1)
        sin = rope.sin[at].unsqueeze(1)
        q = rotate(q, cos, sin)
        k = form.encode(rotate(k, cos, sin))
        v = form.encode(v)
        row = 0
        for segment in batch.segments:
            rows = slice(row, row + segment.count)
            span = slice(segment.start, segment.start + segment.count)
            if batch.pages is not None:
                page = batch.pages[segment.slot, at[rows] // PAGE].long()
                place = at[rows] % PAGE
                k_cache[page, :, place] = k[rows]
                v_cache[page, :, place] = v[rows]
            else:
                k_cache[segment.slot, :, span] = k[rows].transpose(0, 1)
                v_cache[segment.slot, :, span] = v[rows].transpose(0, 1)
            row += segment.count
        return q

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        self.rotate_store(kv, prep, rope, batch, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        def is_hidden(segment: int, keys: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG001
            return keys > positions

        return self._attend(q, k_cache, v_cache, batch, is_hidden)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask
    ) -> Tensor:
        def is_hidden(segment: int, keys: Tensor, positions: Tensor) -> Tensor:
            past = keys > positions if mask.causal else torch.zeros_like(keys > positions)
            early = keys <= positions - mask.window if mask.window else past
            return past | early | (keys < batch.before[segment])

        return self._attend(q, k_cache, v_cache, batch, is_hidden)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        is_hidden: Callable[[int, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Attend to the keys that are not hidden.

        is_hidden: returns bool `[rows, n]` for a segment, keys `[n]` and positions `[rows, 1]`.
        """
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        group = q.shape[1] // k_cache.shape[1]
        row = 0
        form = format_of(k_cache)
        for index, segment in enumerate(batch.segments):
            rows = slice(row, row + segment.count)
            stop = segment.start + segment.count
            k, v = (
                form.decode(read_rows(cache, batch, segment.slot, stop)).float().repeat_interleave(group, dim=0)
                for cache in (k_cache, v_cache)
            )
            scores = q[rows].transpose(0, 1).float() @ k.transpose(1, 2) * q.shape[2] ** -0.5
            unseen = is_hidden(index, torch.arange(stop, device=q.device), batch.positions[rows].unsqueeze(1))
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
            row += segment.count
        return out.flatten(1)

    def pack_gated(self, weight: Tensor | StackedWeight) -> Tensor:
        return self.pack(weight)

    def gated_linear(self, x: Tensor, packed: Tensor) -> Tensor:
        gate, up = self.linear(x, packed).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def experts(self, x: Tensor, experts: Experts, batch: Batch) -> Tensor:
        return run_experts(self, x, experts, batch)

    def fuse_layers(self, *_: object) -> FusedLayers | None:
        return None

    def fuse_context(self, *_: object) -> FusedContext | None:
        return None

    def build_pass(self, *_: object) -> DecodePass | None:
        return None

    def build_draft_pass(self, *_: object) -> DraftPass | None:
        return None

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        return out.copy_(table[tokens.to(table.device)])

    def write_logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: Any, out: Tensor) -> None:
        out.copy_(self.linear(self.add_norm(hidden, None, norm, eps), packed))

    def prepare_step(self, batch: Batch) -> None:
        """Nothing is shared between layers."""

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:  # noqa: ARG002
        return body()
