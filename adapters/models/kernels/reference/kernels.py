"""Plain torch kernels for any device: slow, short and obviously right. The oracle of the fast ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.composed_operations import ComposedOperations
from adapters.models.kernels.expert_sums import run_experts
from adapters.models.kernels.formats.row_format import as_bytes, format_of
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.delta_interface import DeltaKernels
from adapters.models.kernels.interfaces.experts_interface import Experts, list_experts
from adapters.models.kernels.interfaces.fused_layers import FusedLayers
from adapters.models.kernels.interfaces.layer_interface import FusedContext, HeadPrep, Rope
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, Proof
from adapters.models.kernels.reference.delta import ReferenceDelta
from adapters.models.kernels.step_batch import Batch, BlockBatch

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
    pages = batch.pages[slot, : -(-stop // cache.shape[2])].long()
    return as_bytes(cache)[pages].transpose(0, 1).flatten(1, 2)[:, :stop].view(cache.dtype)


class ReferenceKernels(ComposedOperations):
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

    def _add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
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
        queries = heads.shape[1] - (kv if k_cache is v_cache else 2 * kv)
        q = form.rotate(self._rotate(heads[:, :queries], prep.q_norm, prep, rope, batch)).to(qkv.dtype)
        k = form.encode(self._rotate(heads[:, queries : queries + kv], prep.k_norm, prep, rope, batch))
        if k_cache is v_cache:
            self._write_rows(k, k_cache, batch)
            return q
        v = heads[:, -kv:]
        if prep.v_norm:
            v = rms_norm(v, torch.ones(head, device=v.device), prep.eps)
        self._write_rows(k, k_cache, batch)
        self._write_rows(format_of(v_cache).encode(v), v_cache, batch)
        return q

    @staticmethod
    def _write_rows(heads: Tensor, cache: Tensor, batch: Batch) -> None:
        at = batch.positions.clamp(min=0)
        row = 0
        for segment in batch.segments:
            rows = slice(row, row + segment.count)
            span = slice(segment.start, segment.start + segment.count)
            if batch.pages is not None:
                page = batch.pages[segment.slot, at[rows] // cache.shape[2]].long()
                as_bytes(cache)[page, :, at[rows] % cache.shape[2]] = as_bytes(heads)[rows]
            else:
                as_bytes(cache)[segment.slot, :, span] = as_bytes(heads)[rows].transpose(0, 1)
            row += segment.count

    def rotate_queries(self, q: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor) -> Tensor:
        form = format_of(k_cache)
        head = form.head_size(k_cache.shape[3])
        biased = q if prep.bias is None else (q.float() + prep.bias.float()).to(q.dtype)
        return form.rotate(self._rotate(biased.reshape(len(q), -1, head), prep.q_norm, prep, rope, batch)).to(q.dtype)

    @staticmethod
    def _rotate(heads: Tensor, norm: Tensor | None, prep: HeadPrep, rope: Rope, batch: Batch) -> Tensor:
        at = batch.positions.clamp(min=0)
        normed = heads if norm is None else rms_norm(heads, norm, prep.eps)
        return rotate(normed, rope.cos[at].unsqueeze(1), rope.sin[at].unsqueeze(1))

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        self.rotate_store(kv, prep, rope, batch, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rule: AttentionRule = PLAIN) -> Tensor:
        def is_hidden(segment: int, keys: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG001
            later = keys > positions
            return later | (keys <= positions - rule.window) if rule.window else later

        return self._attend(q, k_cache, v_cache, batch, is_hidden, rule)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask, latent: int = 0
    ) -> Tensor:
        def is_hidden(segment: int, keys: Tensor, positions: Tensor) -> Tensor:
            past = keys > positions if mask.causal else torch.zeros_like(keys > positions)
            early = keys <= positions - mask.window if mask.window else past
            return past | early | (keys < batch.before[segment])

        return self._attend(q, k_cache, v_cache, batch, is_hidden, AttentionRule(latent=latent))

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        is_hidden: Callable[[int, Tensor, Tensor], Tensor],
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        """Attend to the keys that are not hidden.

        is_hidden: returns bool `[rows, n]` for a segment, keys `[n]` and positions `[rows, 1]`.
        """
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        group = q.shape[1] // k_cache.shape[1]
        row = 0
        v_form = format_of(v_cache)
        for index, segment in enumerate(batch.segments):
            rows = slice(row, row + segment.count)
            stop = segment.start + segment.count
            k, v = (
                format_of(cache)
                .decode(read_rows(cache, batch, segment.slot, stop))
                .float()
                .repeat_interleave(group, dim=0)
                for cache in (k_cache, v_cache)
            )
            scores = q[rows].transpose(0, 1).float() @ k.transpose(1, 2) * q.shape[2] ** -0.5
            if rule.cap:
                scores = (scores / rule.cap).tanh() * rule.cap
            unseen = is_hidden(index, torch.arange(stop, device=q.device), batch.positions[rows].unsqueeze(1))
            scores = scores.masked_fill(unseen, float("-inf"))
            if rule.sinks is not None:
                sinks = rule.sinks.float()[:, None, None].expand(-1, segment.count, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., :stop]
            out[rows] = v_form.rotate(weights @ v).transpose(0, 1).to(q.dtype)  # rotated once more, it is turned back
            row += segment.count
        return out[..., -rule.latent :].flatten(1)

    def _pack_gated(self, weight: Tensor | StackedWeight) -> Tensor:
        return self.pack(weight)

    def gated_linear(self, x: Tensor, packed: Tensor) -> Tensor:
        gate, up = self.linear(x, packed).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight

    def multiply_heads(self, x: Tensor, packed: Tensor) -> Tensor:
        return torch.einsum("rhk,hnk->rhn", x.float(), packed.float()).to(x.dtype)

    def experts(self, x: Tensor, experts: Experts, batch: Batch, deciding: Tensor | None = None) -> Tensor:
        return run_experts(self, x, experts, batch, deciding=deciding)

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

    def launch(self, name: str, batch: Batch, body: Callable[[], T], *, piece: str = "") -> T:  # noqa: ARG002
        return body()

    def stop_recording(self) -> None:
        """Nothing is ever recorded."""
