"""CPU kernels: oneDNN's products, of weights and in attention, called so that a row never sees its rung.

What makes a row's bits its own:
* oneDNN's products block rows and columns alike at every row count; torch's own `linear` changes kernels with it;
* activations run inside oneDNN, whose vector tails are masked; an ATen elementwise loop may finish with scalar code,
  so outside oneDNN only correctly rounded operations (+, *, /, sqrt, casts) touch the rows, and softmax over rows of
  whole vectors;
* attention is a product with the keys, softmax, and products with the values of at most 1024 keys each, over spans of
  whole tiles of the slot's cache. A key that is not seen weighs exactly zero, and zeros change no bit of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels import Batch, BlockBatch, Rope, Sight
from adapters.models.shard import Segment

T = TypeVar("T")

_MIN_ROWS = 4  # one row alone goes through another kernel of oneDNN than several
_TERMS = 1024  # keys of one product with values: oneDNN splits longer sums, and where they end decides how
# Query rows, and scores of them, that attention works on at a time, so that they stay in the processor's caches.
_QUERIES = 256
_SCORES = 1 << 21
# A narrow step over this many bytes of weights is over before waking other threads has paid: one thread decodes the
# 12M demo as fast as two where nothing else runs, and several times faster where something does. Beside other
# processes two threads took twice as long as one for 16 rows.
_SMALL = 96 << 20
_NARROW = 16
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


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
class Mask:
    """`[rows or 1, 1, n]`, added to the scores of the n keys from `key` on: 0 where a row sees them, else -inf."""

    key: int
    scores: Tensor


@frozen
class Span:
    """Rows that attend together: those of `segment`, which begin at `row` of the batch, to the keys `[first, stop)`."""

    segment: Segment
    row: int
    first: int
    stop: int
    masks: tuple[Mask, ...]


@define(eq=False)
class Plan:
    """What the layers of one step share."""

    segments: list[tuple[int, Segment]]  # with their first rows of the batch
    _angles: tuple[Tensor, Tensor] | None = None
    _spans: dict[Sight | None, list[Span]] = field(init=False, factory=dict)

    def spans(self, sight: Sight | None, make: Callable[[], list[Span]]) -> list[Span]:
        """Made once a step for every kind of sight."""
        found = self._spans.get(sight)
        if found is None:
            found = self._spans[sight] = make()
        return found

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
        for row, segment in self.segments:
            slot, start, count = segment.slot, segment.start, segment.count
            k_cache.select(0, slot).narrow(1, start, count).copy_(k.narrow(1, row, count))
            v_cache.select(0, slot).narrow(1, start, count).copy_(v.narrow(1, row, count))


class CpuKernels:
    """Keeps only what the steps of one shard share; the weights are the shard's."""

    kv_tile = 256

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._compute = dtype if _native(dtype) else torch.float32
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._packed_bytes = 0
        rows = torch.arange(_QUERIES).unsqueeze(1)
        self._later = _hiding(torch.arange(_QUERIES + self.kv_tile) > rows)  # keys counted from the first row's own

    @property
    def name(self) -> str:
        library = "onednn" if _ONEDNN else "aten"
        return f"{library}-{str(self._compute).removeprefix('torch.')}+sums{_TERMS}"

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
        rows = accumulate((segment.count for segment in batch.segments), initial=0)
        batch.plan = Plan(list(zip(rows, batch.segments, strict=False)))

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
        plan.write(rotated[:, queries:], heads[:, -kv:], k_cache, v_cache)
        return rotated[:, :queries].contiguous().view(rung, kv, queries // kv, head)

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
        """Float32 `[H + KV, hd]`, those of q times attention's scale.

        Kept with the tensor it was made from, so that the identity stays taken.
        """
        found = self._norms.get(id(q_norm))
        if found is None:
            scaled = q_norm.float() * q_norm.shape[0] ** -0.5
            weight = torch.cat((scaled.expand(queries, -1), k_norm.float().expand(kv, -1)))
            found = self._norms[id(q_norm)] = (q_norm, weight)
        return found[1]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        plan: Plan = batch.plan
        group = q.shape[2]
        spans = plan.spans(None, lambda: [span for row, one in plan.segments for span in self._causal(row, one, group)])
        return self._attend(q, k_cache, v_cache, batch, spans)

    def attend_block(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, sight: Sight) -> Tensor:
        plan: Plan = batch.plan

        def make() -> list[Span]:
            pairs = zip(plan.segments, batch.before, strict=True)
            return [self._block(row, segment, before, sight) for (row, segment), before in pairs]

        return self._attend(q, k_cache, v_cache, batch, plan.spans(sight, make))

    def _causal(self, row: int, segment: Segment, group: int) -> Iterator[Span]:
        done = 0
        while done < segment.count:
            start = segment.start + done
            count = min(_rows_together(start, group), segment.count - done)
            stop = self._whole_tiles(start + count)
            mask = Mask(start, self._later[:count, :, : stop - start])
            yield Span(Segment(segment.slot, start, count), row + done, 0, stop, (mask,))
            done += count

    def _whole_tiles(self, keys: int) -> int:
        return -(-keys // self.kv_tile) * self.kv_tile

    def _block(self, row: int, segment: Segment, before: int, sight: Sight) -> Span:
        """A sliding window is read from the key tile on in which it starts."""
        start, end = segment.start, segment.start + segment.count
        low = sight.lowest(before, start)
        first, stop = low // self.kv_tile * self.kv_tile, self._whole_tiles(end)
        rows = torch.arange(start, end).unsqueeze(1)
        masks = []
        if low > first:
            masks.append(Mask(first, _hiding(torch.ones(1, low - first, dtype=torch.bool))))
        if sight.window:
            masks.append(Mask(low, _hiding(torch.arange(low, end) <= rows - sight.window)))
        last = rows if sight.causal else rows[-1:]
        masks.append(Mask(start, _hiding(torch.arange(start, stop) > last)))
        return Span(segment, row, first, stop, tuple(masks))

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, spans: list[Span]) -> Tensor:
        if len(spans) == 1 and spans[0].segment.count == batch.rung:
            return self._attend_span(q, k_cache, v_cache, spans[0]).to(self._dtype)
        out = self._output(q, batch)
        for span in spans:
            out.narrow(0, span.row, span.segment.count).copy_(self._attend_span(q, k_cache, v_cache, span))
        return out

    def _output(self, q: Tensor, batch: Batch) -> Tensor:
        out = self._outputs.get(batch.rung)
        if out is None:
            out = self._outputs[batch.rung] = torch.zeros(batch.rung, q[0].numel(), dtype=self._dtype)
        return out

    def _attend_span(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span) -> Tensor:
        """`[count, H hd]`, float32 or in the dtype of products.

        The heads of a group go together, so that keys and values are read once.
        Scores are float32 in every dtype: rounded to bfloat16 they would be the coarsest step of the whole model.
        """
        count, keys = span.segment.count, span.stop - span.first
        k_slot = k_cache.select(0, span.segment.slot).narrow(1, span.first, keys)
        v_slot = v_cache.select(0, span.segment.slot).narrow(1, span.first, keys)
        rows = q.narrow(0, span.row, count)
        group = q.shape[2]
        parts = []
        for head in range(q.shape[1]):
            queries = rows.select(1, head).reshape(count * group, -1)
            if count * group < _MIN_ROWS:
                queries = queries.repeat(_MIN_ROWS, 1)
            scores = product(queries, k_slot.select(0, head).float())
            wide = scores.view(-1, count, group, keys)
            for mask in span.masks:
                wide.narrow(3, mask.key - span.first, mask.scores.shape[2]).add_(mask.scores)
            torch.softmax(scores, -1, out=scores)  # in place: large buffers that come and go cost page faults
            found = self._weighted(scores, v_slot.select(0, head))
            parts.append(found.narrow(0, 0, count * group).view(count, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights float32 `[M, n]` @ values `[n, hd]`, the sums of `_TERMS` keys each added up in float32."""
        if len(values) <= _TERMS:
            return product(weights.to(self._compute), values.to(self._compute).t())
        terms = zip(torch.split(weights, _TERMS, 1), torch.split(values, _TERMS), strict=True)
        first, *rest = (product(some.to(self._compute), those.to(self._compute).t()) for some, those in terms)
        total = first.float()
        for part in rest:
            total += part
        return total

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:  # noqa: ARG002
        if batch.rung > _NARROW or self._packed_bytes > _SMALL:
            return body()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return body()
        finally:
            torch.set_num_threads(threads)


def _rows_together(start: int, group: int) -> int:
    """How many rows from `start` on attend at a time: a power of two, so that the products' shapes recur."""
    most = max(1, min(_QUERIES, _SCORES // (start + _QUERIES)) // group)
    return 1 << most.bit_length() - 1


def _hiding(hidden: Tensor) -> Tensor:
    """bool `[rows, keys]` -> float32 `[rows, 1, keys]`, to be added to the scores of every head of a group."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)
