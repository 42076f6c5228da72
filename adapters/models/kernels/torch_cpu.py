"""CPU kernels: oneDNN's products, of weights and in attention, called so that a row never sees its bucket.

What makes a row's bits its own:
* a product runs with a number of rows that was proven to agree with all others that are used (`proof.py`): a step of
  more rows is multiplied in pieces, one of fewer is padded; how oneDNN cuts a sum differs with the row count, the
  processor and the threads;
* activations run inside oneDNN, whose vector tails are masked; an ATen elementwise loop may finish with scalar code,
  so outside oneDNN only correctly rounded operations (+, *, /, sqrt, casts) touch the rows, and softmax over rows of
  whole vectors;
* attention is a product with the keys, softmax, and products with the values of so many keys each, over spans of
  whole tiles of the slot's cache. A key that is not seen weighs exactly zero, and zeros change no bit of a sum.

Without a plan nothing is cut, padded or promised: that is for tests and for the proof itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.models.kernels import AttentionMask, Batch, BlockBatch, Rope
from adapters.models.kernels.products import (
    NARROW,
    QUERIES,
    TILE,
    Attention,
    Heads,
    ProductPlan,
    Products,
    Unproven,
    queries,
    span_of,
)
from adapters.models.kernels.proof import COUNTS, Proof, name_of, prove
from adapters.models.shard import Segment

T = TypeVar("T")

_TERMS = 1024  # keys of one product with values where there is no plan
# oneDNN's AMX kernels read 16-bit inputs in blocks of so many; in what lies past the end of one a NaN would spread.
_COLUMNS = 32
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


@frozen(eq=False)
class Packed:
    """A weight as oneDNN likes it best (gated: two), and how it is multiplied with.

    columns: K, zeros included that were put behind it. pieces: the row count of a product for every row count of a
    step; None: whatever comes.
    """

    weights: tuple[Tensor, ...]
    dtype: torch.dtype
    columns: int
    pieces: Mapping[int, int] | None


@frozen
class Hidden:
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
    masks: tuple[Hidden, ...]


@define(eq=False)
class Plan:
    """What the layers of one step share."""

    segments: list[tuple[int, Segment]]  # with their first rows of the batch
    _angles: tuple[Tensor, Tensor] | None = None
    _spans: dict[AttentionMask | None, list[Span]] = field(init=False, factory=dict)

    def spans(self, mask: AttentionMask | None, make: Callable[[], list[Span]]) -> list[Span]:
        """Made once a step for every kind of mask."""
        found = self._spans.get(mask)
        if found is None:
            found = self._spans[mask] = make()
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
    """Keeps only what the steps of one shard share; the weights are the shard's.

    plan: in which shapes products run; a product that is not in it raises Unproven.
    """

    kv_tile = TILE

    def __init__(self, dtype: torch.dtype, plan: ProductPlan | None = None) -> None:
        self._dtype, self._plan = dtype, plan
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._attentions: dict[tuple[int, int], Attention] = {}
        rows = torch.arange(QUERIES).unsqueeze(1)
        self._later = _hiding(torch.arange(QUERIES + self.kv_tile) > rows)  # keys counted from the first row's own

    @property
    def name(self) -> str:
        return f"{'onednn' if _ONEDNN else 'aten'}-{name_of(self._dtype)}"

    def fresh(self) -> CpuKernels:
        return self.using(self._plan)

    # --- products, in no particular pieces ---

    def dtypes(self) -> Sequence[torch.dtype]:
        own = [self._dtype] if _native(self._dtype) else []
        return tuple(dict.fromkeys([*own, torch.float32]))

    def reorder(self, weight: Tensor) -> Tensor:
        return _reorder(weight)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight)

    def multiply_gated(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return gated_product(x, gate, up)

    # --- what is proven of them ---

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:
        return prove(self, products, known)

    def using(self, plan: ProductPlan | None) -> CpuKernels:
        return CpuKernels(self._dtype, plan)

    # --- weights ---

    def pack(self, weight: Tensor) -> Packed:
        return self._pack(weight, gated=False)

    def pack_gated(self, weight: Tensor) -> Packed:
        return self._pack(*weight.chunk(2), gated=True)

    def _pack(self, *weights: Tensor, gated: bool) -> Packed:
        outputs, inputs = weights[0].shape
        dtype, pieces = self.dtypes()[0], None
        if self._plan is not None:
            served = self._plan.weight(outputs, inputs, gated=gated)
            dtype = getattr(torch, served.dtype)
            if self._plan.steps:
                pieces = {rows: served.piece(rows) for rows in self._plan.steps}
        columns = inputs if dtype is torch.float32 else -(-inputs // _COLUMNS) * _COLUMNS
        wide = (torch.nn.functional.pad(weight.to(dtype), (0, columns - inputs)) for weight in weights)
        return Packed(tuple(self.reorder(weight.contiguous()) for weight in wide), dtype, columns, pieces)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        [weight] = packed.weights
        return self._in_pieces(x, packed, lambda rows: self.multiply(rows, weight))

    def gated(self, x: Tensor, packed: Packed) -> Tensor:
        gate, up = packed.weights
        return self._in_pieces(x, packed, lambda rows: self.multiply_gated(rows, gate, up))

    def _in_pieces(self, x: Tensor, packed: Packed, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        rows, inputs = x.shape
        count = rows if packed.pieces is None else packed.pieces.get(rows, 0)
        if not count:
            raise Unproven(f"a product of {rows} rows; proven: steps of {sorted(packed.pieces or ())}")
        x = x.to(packed.dtype)
        if count > rows or packed.columns > inputs:
            padded = x.new_zeros(max(count, rows), packed.columns)
            padded[:rows, :inputs] = x
            x = padded
        found = multiply(x) if len(x) == count else torch.cat([multiply(part) for part in torch.split(x, count)])
        return found[:rows].to(self._dtype)

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
        bucket, kv, head = batch.bucket, k_cache.shape[1], k_cache.shape[3]
        heads = qkv.view(bucket, -1, head)
        queries = heads.shape[1] - 2 * kv
        rotated = self._rotated(heads[:, :-kv], self._head_norms(q_norm, k_norm, queries, kv), eps, rope, batch)
        plan.write(rotated[:, queries:], heads[:, -kv:], k_cache, v_cache)
        return rotated[:, :queries].contiguous().view(bucket, kv, queries // kv, head)

    def store(
        self, kv: Tensor, k_norm: Tensor, eps: float, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        plan: Plan = batch.plan
        heads = kv.view(batch.bucket, 2 * k_cache.shape[1], k_cache.shape[3])
        keys, values = heads.chunk(2, dim=1)
        weight = self._head_norms(k_norm, k_norm, 0, k_cache.shape[1])
        plan.write(self._rotated(keys, weight, eps, rope, batch), values, k_cache, v_cache)

    @staticmethod
    def _rotated(heads: Tensor, weight: Tensor, eps: float, rope: Rope, batch: Batch) -> Tensor:
        """Float32 `[R, heads, hd]`: normed with weight `[heads, hd]`, then rotated to the rows' positions."""
        bucket, _, head = heads.shape
        cos, sin = batch.plan.angles(rope, batch)
        normed = torch.rms_norm(heads.float(), (head,), None, eps).mul_(weight)
        swapped = normed.view(bucket, -1, 2, head // 2).flip(2).view_as(normed)
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
        plan, how, capacity = batch.plan, self._how(q), k_cache.shape[2]

        def make() -> list[Span]:
            return [span for row, one in plan.segments for span in self._causal(row, one, how, capacity)]

        return self._attend(q, k_cache, v_cache, batch, plan.spans(None, make))

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask
    ) -> Tensor:
        plan, how, capacity = batch.plan, self._how(q), k_cache.shape[2]

        def make() -> list[Span]:
            pairs = zip(plan.segments, batch.before, strict=True)
            return [span for (row, one), before in pairs for span in self._block(row, one, before, mask, how, capacity)]

        return self._attend(q, k_cache, v_cache, batch, plan.spans(mask, make))

    def _how(self, q: Tensor) -> Attention:
        _, _, group, size = q.shape
        found = self._attentions.get((group, size))
        if found is None:
            unproven = Attention(Heads(group, size, 0), name_of(self.dtypes()[0]), COUNTS, _TERMS)
            found = unproven if self._plan is None else self._plan.attention(group, size)
            self._attentions[group, size] = found
        return found

    def _causal(self, row: int, segment: Segment, how: Attention, capacity: int) -> Iterator[Span]:
        done, group = 0, how.heads.group
        while done < segment.count:
            start = segment.start + done
            count = min(queries(group, span_of(start + QUERIES, capacity), how.rows), segment.count - done)
            stop = span_of(start + count, capacity)
            yield Span(Segment(segment.slot, start, count), row + done, 0, stop, self._later_keys(start, count, stop))
            done += count

    def _later_keys(self, start: int, count: int, stop: int) -> tuple[Hidden, ...]:
        near = min(stop - start, self._later.shape[2])
        masks = [Hidden(start, self._later[:count, :, :near])]
        if start + near < stop:
            masks.append(Hidden(start + near, _hiding(torch.ones(1, stop - start - near, dtype=torch.bool))))
        return tuple(masks)

    @staticmethod
    def _block(
        row: int, segment: Segment, before: int, mask: AttentionMask, how: Attention, capacity: int
    ) -> Iterator[Span]:
        """A sliding window is read from the key tile on in which it starts."""
        end = segment.start + segment.count
        low = mask.lowest(before, segment.start)
        first = low // TILE * TILE
        keys = span_of(end - first, capacity)
        first = min(first, capacity - keys)
        together = queries(how.heads.group, keys, how.rows)
        for done in range(0, segment.count, together):
            rows = torch.arange(segment.start + done, min(segment.start + done + together, end)).unsqueeze(1)
            masks = []
            if low > first:
                masks.append(Hidden(first, _hiding(torch.ones(1, low - first, dtype=torch.bool))))
            if mask.window:
                masks.append(Hidden(low, _hiding(torch.arange(low, end) <= rows - mask.window)))
            last = rows if mask.causal else rows.new_tensor([[end - 1]])
            masks.append(Hidden(segment.start, _hiding(torch.arange(segment.start, first + keys) > last)))
            part = evolve(segment, start=segment.start + done, count=len(rows))
            yield Span(part, row + done, first, first + keys, tuple(masks))

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, spans: list[Span]) -> Tensor:
        if len(spans) == 1 and spans[0].segment.count == batch.bucket:
            return self._attend_span(q, k_cache, v_cache, spans[0]).to(self._dtype)
        out = self._output(q, batch)
        for span in spans:
            out.narrow(0, span.row, span.segment.count).copy_(self._attend_span(q, k_cache, v_cache, span))
        return out

    def _output(self, q: Tensor, batch: Batch) -> Tensor:
        out = self._outputs.get(batch.bucket)
        if out is None:
            out = self._outputs[batch.bucket] = torch.zeros(batch.bucket, q[0].numel(), dtype=self._dtype)
        return out

    def _attend_span(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span) -> Tensor:
        """`[count, H hd]`, float32 or in the dtype of products.

        The heads of a group go together, so that keys and values are read once.
        Scores are float32 in every dtype: rounded to bfloat16 they would be the coarsest step of the whole model.
        """
        count, keys, how = span.segment.count, span.stop - span.first, self._how(q)
        k_slot = k_cache.select(0, span.segment.slot).narrow(1, span.first, keys)
        v_slot = v_cache.select(0, span.segment.slot).narrow(1, span.first, keys)
        rows, group = q.narrow(0, span.row, count), q.shape[2]
        most = next((proven for proven in how.rows if proven >= count * group), 0)
        if not most:
            raise Unproven(f"attention of {count * group} query rows; proven: {how.rows}")
        parts = []
        for head in range(q.shape[1]):
            asking = rows.select(1, head).reshape(count * group, -1)
            if most > count * group:
                asking = torch.cat((asking, asking.new_zeros(most - count * group, asking.shape[1])))
            scores = self.multiply(asking, k_slot.select(0, head).float())
            wide = scores.narrow(0, 0, count * group).view(count, group, keys)
            for mask in span.masks:
                wide.narrow(2, mask.key - span.first, mask.scores.shape[2]).add_(mask.scores)
            torch.softmax(scores, -1, out=scores)  # in place: large buffers that come and go cost page faults
            found = self._weighted(scores, v_slot.select(0, head), how)
            parts.append(found.narrow(0, 0, count * group).view(count, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _weighted(self, weights: Tensor, values: Tensor, how: Attention) -> Tensor:
        """weights float32 `[M, n]` @ values `[n, hd]`, the sums of `terms` keys each added up in float32."""
        dtype = getattr(torch, how.dtype)
        if len(values) <= how.terms:
            return self.multiply(weights.to(dtype), values.to(dtype).t())
        terms = zip(torch.split(weights, how.terms, 1), torch.split(values, how.terms), strict=True)
        first, *rest = (self.multiply(some.to(dtype).contiguous(), those.to(dtype).t()) for some, those in terms)
        total = first.float()
        for part in rest:
            total += part
        return total

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:  # noqa: ARG002
        if self._plan is None:
            return body()
        (narrow, wide), threads = self._plan.threads, torch.get_num_threads()
        if threads != wide:
            raise Unproven(f"products were proven for {wide} threads, and there are {threads} now")
        if batch.bucket > NARROW or narrow == wide:
            return body()
        torch.set_num_threads(narrow)
        try:
            return body()
        finally:
            torch.set_num_threads(wide)


def _hiding(hidden: Tensor) -> Tensor:
    """bool `[rows, keys]` -> float32 `[rows, 1, keys]`, to be added to the scores of every head of a group."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)
