"""CPU kernels: oneDNN's prepacked products and torch's flash attention, called so that a row never sees its rung.

What makes a row's bits its own:
* oneDNN's prepacked products block rows, never the inner sum; torch's own `linear` changes kernels with the row count;
* activations run inside oneDNN, whose vector tails are masked; an ATen elementwise loop may finish with scalar code,
  so outside oneDNN only correctly rounded operations (+, *, /, sqrt, casts) touch the rows;
* attention sees at least 4 query rows of a head and key spans of whole 512-key tiles of the slot's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels import Batch, BlockBatch, Rope, Sight
from adapters.models.shard import Segment

T = TypeVar("T")

_MIN_ROWS = 4
# A narrow step over this many bytes of weights is over before waking other threads has paid: one thread decodes the
# 12M demo as fast as two where nothing else runs, and several times faster where something does.
_SMALL = 96 << 20
_NARROW = 8
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - no public name


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight.default(weight) if _ONEDNN else weight  # noqa: SLF001


def _native(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype on this processor; otherwise it is computed in float32."""
    if dtype is torch.float32:
        return True
    if not _ONEDNN:
        return False
    half, brain = torch.ops.mkldnn._is_mkldnn_fp16_supported, torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
    return brain() if dtype is torch.bfloat16 else half()


if _ONEDNN:
    _linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    _linear_binary = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001


def product(x: Tensor, packed: Tensor) -> Tensor:
    if not _ONEDNN:
        return torch.nn.functional.linear(x, packed)
    return _linear(x, packed, None, "none", [], "")


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    if not _ONEDNN:
        return torch.nn.functional.silu(product(x, gate)).mul_(product(x, up))
    return _linear_binary(x, _linear(x, gate, None, "swish", [], ""), up, None, "mul")


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

    @property
    def fold(self) -> bool:
        return self.window == 0

    def positions(self) -> Tensor:
        """Of the window's rows; those outside the segment repeat its first: finite, and never read."""
        rows = torch.arange(self.first - self.row, self.first - self.row + max(self.window, 1))
        return rows.clamp_(0, self.segment.count - 1).add_(self.segment.start)


@define(eq=False)
class Plan:
    """What the layers of one step share."""

    spans: list[Span]
    _angles: tuple[Tensor, Tensor] | None = None
    _masks: dict[tuple[Span, Sight | None], Tensor] = field(init=False, factory=dict)

    def mask(self, span: Span, dtype: torch.dtype, sight: Sight | None = None, before: int = 0) -> Tensor:
        """`[window, keys]`, added to the scores; built once a step. before: the first key of a block's context."""
        key = (span, sight)
        if key not in self._masks:
            seen = sight or Sight(causal=True)
            start, stop = span.segment.start, span.segment.start + span.segment.count
            positions = span.positions().unsqueeze(1)
            mask = self._masks[key] = torch.zeros(len(positions), span.keys, dtype=dtype)
            if seen.causal:
                mask[:, start:].masked_fill_(torch.arange(start, span.keys) > positions, float("-inf"))
            else:
                mask[:, stop:] = float("-inf")
            low = seen.lowest(before, start)
            mask[:, :low] = float("-inf")
            if seen.window:
                mask[:, low:stop].masked_fill_(torch.arange(low, stop) <= positions - seen.window, float("-inf"))
        return self._masks[key]

    def angles(self, rope: Rope, batch: Batch) -> tuple[Tensor, Tensor]:
        """Float32 `[R, 1, hd]` factors of a head and of the head with its halves swapped; gathered once a step."""
        if self._angles is None:
            at = batch.positions.clamp(min=0)
            cos, sin = rope.cos[at], rope.sin[at]
            self._angles = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
        return self._angles

    def write(self, keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Put keys and values, each `[R, KV, hd]`, at the rows' slots and positions."""
        k, v = keys.transpose(0, 1), values.transpose(0, 1)
        for span in self.spans:
            slot, start, count = span.segment.slot, span.segment.start, span.segment.count
            k_cache.select(0, slot).narrow(1, start, count).copy_(k.narrow(1, span.row, count))
            v_cache.select(0, slot).narrow(1, start, count).copy_(v.narrow(1, span.row, count))


class CpuKernels:
    """Keeps only what the steps of one shard share; the weights are the shard's."""

    kv_tile = 512

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._compute = dtype if _native(dtype) else torch.float32
        self._queries: dict[tuple[int, ...], Tensor] = {}
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._packed_bytes = 0
        self._group = 0  # query heads of a key/value head

    @property
    def name(self) -> str:
        library = "onednn" if _ONEDNN else "aten"
        return f"{library}-{str(self._compute).removeprefix('torch.')}+flash512"

    def fresh(self) -> CpuKernels:
        return CpuKernels(self._dtype)

    def pack(self, weight: Tensor) -> Tensor:
        packed = _reorder(weight.to(self._compute))
        self._packed_bytes += weight.numel() * self._compute.itemsize
        return packed

    def linear(self, x: Tensor, packed: Tensor) -> Tensor:
        if self._compute is self._dtype:
            return product(x, packed)
        return product(x.to(self._compute), packed).to(self._dtype)

    def pack_gated(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = weight.chunk(2)
        return self.pack(gate.contiguous()), self.pack(up.contiguous())

    def gated(self, x: Tensor, packed: tuple[Tensor, Tensor]) -> Tensor:
        if self._compute is self._dtype:
            return gated_product(x, *packed)
        return gated_product(x.to(self._compute), *packed).to(self._dtype)

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
        return Span(segment, row, keys, first, window)

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
        queries = heads.shape[1] - 2 * kv
        rotated = self._rotated(heads[:, :-kv], self._head_norms(q_norm, k_norm, queries, kv), eps, rope, batch)
        group = self._group = queries // kv
        q = self._query_buffer(rung, kv, group, head)
        q[:, :, :group].copy_(rotated[:, :queries].view(rung, kv, -1, head))
        plan.write(rotated[:, queries:], heads[:, -kv:], k_cache, v_cache)
        return q

    def store(
        self, kv: Tensor, k_norm: Tensor, eps: float, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        plan: Plan = batch.plan
        heads = kv.view(batch.rung, 2 * k_cache.shape[1], k_cache.shape[3])
        keys, values = heads.chunk(2, dim=1)
        weight = self._head_norms(k_norm, k_norm, 0, k_cache.shape[1])
        plan.write(self._rotated(keys, weight, eps, rope, batch), values, k_cache, v_cache)

    @staticmethod
    def _rotated(heads: Tensor, weight: Tensor, eps: float, rope: Rope, batch: Batch) -> Tensor:
        """Float32 `[R, heads, hd]`: normed with weight `[heads, hd]`, then rotated to the rows' positions."""
        rung, _, head = heads.shape
        cos, sin = batch.plan.angles(rope, batch)
        normed = torch.rms_norm(heads.float(), (head,), None, eps).mul_(weight)
        swapped = normed.view(rung, -1, 2, head // 2).flip(2).view_as(normed)
        return normed.mul_(cos).add_(swapped.mul_(sin))

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
        if len(plan.spans) == 1 and plan.spans[0].window == batch.rung:
            return self._attend_window(q, k_cache, v_cache, plan.spans[0], plan)
        out = self._output(k_cache, batch)
        for span in plan.spans:
            count = span.segment.count
            if span.fold:
                rows = self._attend_row(q, k_cache, v_cache, span, plan)
            else:
                window = self._attend_window(q, k_cache, v_cache, span, plan)
                rows = window.narrow(0, span.row - span.first, count)
            out.narrow(0, span.row, count).copy_(rows)
        return out

    def attend_block(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, sight: Sight) -> Tensor:
        plan: Plan = batch.plan
        out = self._output(k_cache, batch)
        for span, before in zip(plan.spans, batch.before, strict=True):
            # A sliding window is read from the key tile on in which it starts.
            start = sight.lowest(before, span.segment.start) // self.kv_tile * self.kv_tile
            mask = plan.mask(span, self._dtype, sight, before)[:, start:]
            window = self._window_of(q, k_cache, v_cache, span, self._group, mask, start)
            out.narrow(0, span.row, span.segment.count).copy_(
                window.narrow(0, span.row - span.first, span.segment.count)
            )
        return out

    def _output(self, k_cache: Tensor, batch: Batch) -> Tensor:
        out = self._outputs.get(batch.rung)
        if out is None:
            width = k_cache.shape[1] * self._group * k_cache.shape[3]
            out = self._outputs[batch.rung] = torch.zeros(batch.rung, width, dtype=self._dtype)
        return out

    def _attend_row(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, plan: Plan) -> Tensor:
        slot, keys = span.segment.slot, span.keys
        k, v = k_cache.narrow(0, slot, 1).narrow(2, 0, keys), v_cache.narrow(0, slot, 1).narrow(2, 0, keys)
        heads = _flash(q.narrow(0, span.row, 1), k, v, attn_mask=plan.mask(span, self._dtype))[0]
        return heads.narrow(2, 0, self._group).reshape(1, -1)

    def _attend_window(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, plan: Plan) -> Tensor:
        return self._window_of(q, k_cache, v_cache, span, self._group, plan.mask(span, self._dtype), 0)

    @staticmethod
    def _window_of(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, group: int, mask: Tensor, start: int
    ) -> Tensor:
        """Keys `[start, span.keys)`, for which mask is; -> `[span.window, H hd]`."""
        slot, keys = span.segment.slot, span.keys
        rows = q[span.first : span.first + span.window, :, :group].permute(1, 2, 0, 3)
        k = k_cache[slot, :, None, start:keys].expand(-1, group, -1, -1)
        v = v_cache[slot, :, None, start:keys].expand(-1, group, -1, -1)
        return _flash(rows, k, v, attn_mask=mask)[0].permute(2, 0, 1, 3).reshape(span.window, -1)

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:  # noqa: ARG002
        if batch.rung > _NARROW or self._packed_bytes > _SMALL:
            return body()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return body()
        finally:
            torch.set_num_threads(threads)


def _window(count: int, rung: int) -> int:
    window = _MIN_ROWS
    while window < count:
        window *= 2
    return min(window, rung)
