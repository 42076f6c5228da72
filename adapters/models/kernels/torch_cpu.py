"""CPU kernels: oneDNN's prepacked products and torch's flash attention, called so that a row never sees its rung.

What makes a row's bits its own:
* oneDNN's prepacked products block rows, never the inner sum; torch's own `linear` changes kernels with the row count;
* activations run inside oneDNN, whose vector tails are masked; an ATen elementwise loop may finish with scalar code,
  so outside oneDNN only correctly rounded operations (+, *, /, sqrt, casts) touch the rows;
* attention sees at least 4 query rows of a head and key spans of whole 512-key tiles of the slot's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from attrs import define, frozen
from torch import Tensor

from adapters.models.kernels import Batch, Rope
from adapters.models.shard import Segment

T = TypeVar("T")

_MIN_ROWS = 4
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


@frozen
class Span:
    """How one segment is attended to. Its rows of the batch are `[row, row + count)`.

    A single row lays its group of heads out as query rows (`fold`); more rows form a window of `window` rows, a
    proven count, starting at row `first` of the batch, which holds them all.
    """

    segment: Segment
    row: int
    keys: int
    first: int
    window: int
    mask: Tensor

    @property
    def fold(self) -> bool:
        return self.window == 0


@define(eq=False)
class Plan:
    spans: list[Span]
    group: int = 0
    cos: Tensor | None = None
    sin: Tensor | None = None


class CpuKernels:
    """Keeps only what the steps of one shard share; the weights are the shard's."""

    kv_tile = 512

    def __init__(self, dtype: torch.dtype) -> None:
        # Processors without half-precision products compute float16 models in float32.
        self._dtype = dtype
        native = dtype is torch.float32 or (
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
            if dtype is torch.bfloat16
            else torch.ops.mkldnn._is_mkldnn_fp16_supported()
        )
        self._compute = dtype if native else torch.float32
        self._queries: dict[tuple[int, ...], Tensor] = {}
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def name(self) -> str:
        product = str(self._compute).removeprefix("torch.")
        return f"onednn-{product}+flash512"

    def fresh(self) -> CpuKernels:
        return CpuKernels(self._dtype)

    def pack(self, weight: Tensor) -> Tensor:
        return _reorder(weight.to(self._compute))

    def linear(self, x: Tensor, packed: Tensor) -> Tensor:
        if self._compute is not self._dtype:
            return _linear(x.to(self._compute), packed, None, "none", [], "").to(self._dtype)
        return _linear(x, packed, None, "none", [], "")

    def pack_gated(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = weight.chunk(2)
        return self.pack(gate.contiguous()), self.pack(up.contiguous())

    def gated(self, x: Tensor, packed: tuple[Tensor, Tensor]) -> Tensor:
        gate, up = packed
        wide = x.to(self._compute)
        activated = _linear(wide, gate, None, "swish", [], "")
        return _linear_binary(wide, activated, up, None, "mul").to(self._dtype)

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            residual.add_(delta)
        return torch.rms_norm(residual, weight.shape, weight, eps)

    def prepare(self, batch: Batch) -> None:
        spans = []
        row = 0
        for segment in batch.segments:
            spans.append(self._span(segment, row, batch.rung))
            row += segment.count
        batch.plan = Plan(spans)

    def _span(self, segment: Segment, row: int, rung: int) -> Span:
        keys = -(-(segment.start + segment.count) // self.kv_tile) * self.kv_tile
        fold = segment.count == 1
        window = 0 if fold else _window(segment.count, rung)
        first = row if fold else min(row, rung - window)
        # Rows of the window outside the segment repeat its first position: finite, and never read.
        positions = torch.arange(first - row, first - row + max(window, 1)).clamp(min=0).add_(segment.start)
        mask = torch.zeros(len(positions), keys, dtype=self._dtype)
        mask[:, segment.start :].masked_fill_(
            torch.arange(segment.start, keys) > positions.unsqueeze(1), float("-inf")
        )
        return Span(segment, row, keys, first, window, mask)

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
        plan: Plan = batch.plan
        rung, kv, head = batch.rung, k_cache.shape[1], k_cache.shape[3]
        heads = qkv.view(rung, -1, head)
        if plan.cos is None:
            at = batch.positions.clamp(min=0)
            cos, sin = rope.cos[at], rope.sin[at]
            plan.cos = torch.cat((cos, cos), -1).unsqueeze(1)
            plan.sin = torch.cat((-sin, sin), -1).unsqueeze(1)
        queries = heads.shape[1] - 2 * kv
        weight = self._head_norms(q_norm, k_norm, queries, kv)
        normed = torch.rms_norm(heads[:, :-kv].float(), (head,), None, eps).mul_(weight)
        swapped = normed.unflatten(2, (2, -1)).flip(2).flatten(2)
        rotated = normed.mul_(plan.cos).add_(swapped.mul_(plan.sin))
        plan.group = queries // kv
        q = self._query_buffer(rung, kv, plan.group, head)
        q[:, :, : plan.group].copy_(rotated[:, :queries].unflatten(1, (kv, -1)))
        for span in plan.spans:
            segment = span.segment
            rows, keys = slice(span.row, span.row + segment.count), slice(segment.start, segment.start + segment.count)
            k_cache[segment.slot, :, keys].copy_(rotated[rows, queries:].transpose(0, 1))
            v_cache[segment.slot, :, keys].copy_(heads[rows, -kv:].transpose(0, 1))
        return q

    def _head_norms(self, q_norm: Tensor, k_norm: Tensor, queries: int, kv: int) -> Tensor:
        """Float32 `[H + KV, hd]`, kept with the tensor it was made from, so that the identity stays taken."""
        found = self._norms.get(id(q_norm))
        if found is None:
            weight = torch.cat((q_norm.expand(queries, -1), k_norm.expand(kv, -1))).float()
            found = self._norms[id(q_norm)] = (q_norm, weight)
        return found[1]

    def _query_buffer(self, rung: int, kv: int, group: int, head: int) -> Tensor:
        """`[R, KV, padded group, hd]`: rows past the group stay zero and make the folded form a proven count."""
        key = (rung, kv, group, head)
        if key not in self._queries:
            padded = max(_MIN_ROWS, 1 << (group - 1).bit_length())
            self._queries[key] = torch.zeros(rung, kv, padded, head, dtype=self._dtype)
        return self._queries[key]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        plan: Plan = batch.plan
        group: int = plan.group
        if len(plan.spans) == 1 and plan.spans[0].window == batch.rung:
            return self._attend_window(q, k_cache, v_cache, plan.spans[0], group)
        out = torch.zeros(batch.rung, k_cache.shape[1] * group * k_cache.shape[3], dtype=self._dtype)
        for span in plan.spans:
            if span.fold:
                out[span.row] = self._attend_row(q, k_cache, v_cache, span, group)
            else:
                skip = span.row - span.first
                rows = self._attend_window(q, k_cache, v_cache, span, group)
                out[span.row : span.row + span.segment.count] = rows[skip : skip + span.segment.count]
        return out

    def _attend_row(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, group: int) -> Tensor:
        slot, keys = slice(span.segment.slot, span.segment.slot + 1), span.keys
        row = q[span.row : span.row + 1]
        heads = _flash(row, k_cache[slot, :, :keys], v_cache[slot, :, :keys], attn_mask=span.mask)[0]
        return heads[0, :, :group].reshape(-1)

    def _attend_window(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, group: int) -> Tensor:
        slot, keys = span.segment.slot, span.keys
        rows = q[span.first : span.first + span.window, :, :group].permute(1, 2, 0, 3)
        k = k_cache[slot, :, None, :keys].expand(-1, group, -1, -1)
        v = v_cache[slot, :, None, :keys].expand(-1, group, -1, -1)
        return _flash(rows, k, v, attn_mask=span.mask)[0].permute(2, 0, 1, 3).reshape(span.window, -1)

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:  # noqa: ARG002
        return body()


def _window(count: int, rung: int) -> int:
    window = _MIN_ROWS
    while window < count:
        window *= 2
    return min(window, rung)
