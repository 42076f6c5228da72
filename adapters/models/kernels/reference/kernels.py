"""Plain torch kernels for any device: slow, short and obviously right. The oracle of the fast ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import Stack
from adapters.models.kernels.delta_interface import DeltaKernels
from adapters.models.kernels.experts_interface import Experts, experts_feed, one_by_one
from adapters.models.kernels.interface import AttentionMask, ContextAtOnce, HeadPrep, LayersAtOnce, Rope
from adapters.models.kernels.product_list import ProductPlan, Products, Proof
from adapters.models.kernels.reference.delta import ReferenceDelta
from adapters.models.kernels.row_format import form_of
from adapters.models.kernels.step_batch import Batch, BlockBatch
from effects.ids import PAGE

T = TypeVar("T")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A weight in float32 is multiplied in float32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[R, heads, hd]`; cos, sin float32 `[R, 1, n]`; half-split over the first 2 n numbers, computed in float32,
    rounded once.
    """
    size = cos.shape[-1]
    first, second, rest = x[..., :size].float(), x[..., size : 2 * size].float(), x[..., 2 * size :].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def rows_of(cache: Tensor, batch: Batch, slot: int, stop: int) -> Tensor:
    """`[KV, stop, hd]`, from wherever they are."""
    if batch.pages is None:
        return cache[slot, :, :stop]
    pages = batch.pages[slot, : -(-stop // PAGE)].long()
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :stop]


class ReferenceKernels:
    """Reads `batch.segments` on the host, so it cannot be recorded as a graph, and makes no promise about bits."""

    name = "reference"
    kv_tile = 64
    paged = False  # as an oracle is used; rows are read in both ways
    packs_experts = False
    delta: DeltaKernels | None = ReferenceDelta()
    stacked = staticmethod(one_by_one)

    @property
    def numbers(self) -> tuple[object, ...]:
        return ()

    def fresh(self) -> ReferenceKernels:
        return ReferenceKernels()

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:  # noqa: ARG002
        return Proof(None)

    def using(self, plan: ProductPlan | None) -> ReferenceKernels:  # noqa: ARG002
        return self.fresh()

    def pack(self, weight: Tensor | Stack) -> Tensor:
        return weight.unpacked() if isinstance(weight, Stack) else weight

    def linear(self, x: Tensor, packed: Tensor) -> Tensor:
        return (x.float() @ packed.float().T).to(x.dtype)

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            residual += delta
        return rms_norm(residual, weight, eps)

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        form = form_of(k_cache)
        kv, head = k_cache.shape[1], form.head(k_cache.shape[3])
        biased = qkv if prep.bias is None else (qkv.float() + prep.bias.float()).to(qkv.dtype)
        heads = biased.reshape(len(qkv), qkv.shape[1] // head, head)
        q, k, v = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
        if prep.q_norm is not None and prep.k_norm is not None:
            q, k = rms_norm(q, prep.q_norm, prep.eps), rms_norm(k, prep.k_norm, prep.eps)
        at = batch.positions.clamp(min=0)
        cos, sin = rope.cos[at].unsqueeze(1), rope.sin[at].unsqueeze(1)
        q, k, v = rotate(q, cos, sin), form.encode(rotate(k, cos, sin)), form.encode(v)
        row = 0
        for segment in batch.segments:
            rows, span = slice(row, row + segment.count), slice(segment.start, segment.start + segment.count)
            if batch.pages is not None:
                page, place = batch.pages[segment.slot, at[rows] // PAGE].long(), at[rows] % PAGE
                k_cache[page, :, place], v_cache[page, :, place] = k[rows], v[rows]
            else:
                k_cache[segment.slot, :, span] = k[rows].transpose(0, 1)
                v_cache[segment.slot, :, span] = v[rows].transpose(0, 1)
            row += segment.count
        return q

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        self.rotate_store(kv, prep, rope, batch, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        def hidden(segment: int, keys: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG001
            return keys > positions

        return self._attend(q, k_cache, v_cache, batch, hidden)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask
    ) -> Tensor:
        def hidden(segment: int, keys: Tensor, positions: Tensor) -> Tensor:
            past = keys > positions if mask.causal else torch.zeros_like(keys > positions)
            early = keys <= positions - mask.window if mask.window else past
            return past | early | (keys < batch.before[segment])

        return self._attend(q, k_cache, v_cache, batch, hidden)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        hidden: Callable[[int, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """hidden(segment, keys `[n]`, positions `[rows, 1]`) -> bool `[rows, n]`: what a row must not see."""
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        group = q.shape[1] // k_cache.shape[1]
        row, form = 0, form_of(k_cache)
        for index, segment in enumerate(batch.segments):
            rows, stop = slice(row, row + segment.count), segment.start + segment.count
            k, v = (
                form.decode(rows_of(cache, batch, segment.slot, stop)).float().repeat_interleave(group, dim=0)
                for cache in (k_cache, v_cache)
            )
            scores = q[rows].transpose(0, 1).float() @ k.transpose(1, 2) * q.shape[2] ** -0.5
            unseen = hidden(index, torch.arange(stop, device=q.device), batch.positions[rows].unsqueeze(1))
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
            row += segment.count
        return out.flatten(1)

    def pack_gated(self, weight: Tensor | Stack) -> Tensor:
        return self.pack(weight)

    def gated(self, x: Tensor, packed: Tensor) -> Tensor:
        gate, up = self.linear(x, packed).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def experts(self, x: Tensor, experts: Experts, batch: Batch) -> Tensor:
        return experts_feed(self, x, experts, batch)

    def at_once(self, *_: object) -> LayersAtOnce | None:
        return None

    def context_at_once(self, *_: object) -> ContextAtOnce | None:
        return None

    def logits(self, hidden: Tensor, norm: Tensor, eps: float, packed: Any, out: Tensor) -> None:
        out.copy_(self.linear(self.add_norm(hidden, None, norm, eps), packed))

    def prepare(self, batch: Batch) -> None:
        """Nothing is shared between layers."""

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:  # noqa: ARG002
        return body()
