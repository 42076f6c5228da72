"""Attention on a CPU: by the compiled library, or by products and a softmax over spans of a slot's cache.

Without the library a span of keys is multiplied with the queries, the scores go through softmax, and the weights are
multiplied with the values. Spans are whole tiles, and products run with row counts that were proven. A key that is
not seen weighs exactly zero, and zeros change no bit of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import define, evolve, field
from torch import Tensor

from adapters.models.kernels.cpu.step_plan import ScoreMask, Span
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.functions.vector_functions import VECTOR, apply_in_vectors
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.multiplier import Multiplier, dtype_name
from adapters.models.kernels.interfaces.product_list import (
    COUNTS,
    NATIVE,
    QUERIES,
    TILE,
    Heads,
    ProductPlan,
    ServedHeads,
    UnprovenProductError,
    count_query_rows,
    span_of,
)
from adapters.models.kernels.step import Segment
from adapters.models.kernels.step_batch import Batch, BlockBatch

_TERMS = 1024  # keys of one product with values where there is no plan


@define(eq=False)
class CpuAttention:
    """Attention of one shard, with an output buffer for each bucket and width of a row.

    plan: the shapes in which products run; None: in whatever shape comes, and nothing is promised.
    """

    kernels: Multiplier
    dtype: torch.dtype
    plan: ProductPlan | None
    _outputs: dict[tuple[int, int], Tensor] = field(init=False, factory=dict)
    _attentions: dict[tuple[int, int], ServedHeads] = field(init=False, factory=dict)
    _later: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        rows = torch.arange(QUERIES).unsqueeze(1)
        self._later = _make_mask(torch.arange(QUERIES + TILE) > rows)  # keys counted from the first row's own

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, rule: AttentionRule = PLAIN) -> Tensor:
        plan = batch.plan
        how = self._find_proven(*q.shape[2:])
        capacity = k_cache.shape[2]
        # NATIVE in the place of a dtype: the compiled library attends as a whole, so no product needs a dtype.
        if how.dtype == NATIVE:
            seen = (plan.find_nearest_keys(rule.window, batch), batch.lengths)
            return keep_values(self._attend_natively(q, k_cache, v_cache, batch, how, seen, rule), q, rule.latent)

        def make() -> list[Span]:
            return [
                span
                for row, one in plan.segments_with_rows
                for span in self._causal_spans(row, one, how, capacity, rule.window)
            ]

        spans = plan.make_spans_once(rule.window, make)
        return keep_values(self._attend_spans(q, k_cache, v_cache, batch, spans, rule), q, rule.latent)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask, latent: int
    ) -> Tensor:
        plan = batch.plan
        how = self._find_proven(*q.shape[2:])
        capacity = k_cache.shape[2]
        if how.dtype == NATIVE:
            seen = plan.find_seen_keys(mask, batch)
            return keep_values(self._attend_natively(q, k_cache, v_cache, batch, how, seen), q, latent)

        def make() -> list[Span]:
            pairs = zip(plan.segments_with_rows, batch.before, strict=True)
            return [
                span
                for (row, one), before in pairs
                for span in self._block_spans(row, one, before, mask, how, capacity)
            ]

        spans = plan.make_spans_once(mask, make)
        return keep_values(self._attend_spans(q, k_cache, v_cache, batch, spans), q, latent)

    def is_native(self, group: int, size: int, rows: int) -> bool:
        """Return whether the compiled library attends in steps of this many rows."""
        how = self._find_proven(group, size)
        return how.dtype == NATIVE and (self.plan is None or not self.plan.steps or rows in how.rows)

    def _find_proven(self, group: int, size: int) -> ServedHeads:
        found = self._attentions.get((group, size))
        if found is None:
            way = (
                NATIVE if self.kernels.native_attention is not None else dtype_name(self.kernels.attention_dtypes()[0])
            )
            unproven = ServedHeads(Heads(group, size, 0), way, () if way == NATIVE else COUNTS, _TERMS)
            found = unproven if self.plan is None else self.plan.find_attention(group, size)
            self._attentions[group, size] = found
        return found

    def _attend_natively(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        how: ServedHeads,
        seen: tuple[Tensor | None, Tensor],
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        """Attend with the compiled library. Arguments and the result are those of `ExactAttention.attend`.

        Raises UnprovenProductError if the library is not available here, or was not proven for steps of this many rows.
        """
        native_attention = self.kernels.native_attention
        if native_attention is None:
            raise UnprovenProductError("the plan wants attention of the compiled library, which is not available here")
        if self.plan is not None and self.plan.steps and batch.bucket not in how.rows:
            raise UnprovenProductError(f"attention of {batch.bucket} rows; proven: {how.rows}")
        batch.plan.check_caches(k_cache.shape[0], k_cache.shape[2])
        return native_attention.attend(q, batch.slots, seen, k_cache, v_cache, rule)

    def _causal_spans(
        self, row: int, segment: Segment, served: ServedHeads, capacity: int, window: int
    ) -> Iterator[Span]:
        """Cut a segment into spans. They begin at key 0, so that their products are proven ones; a window hides keys
        behind it.
        """
        done = 0
        group = served.heads.group
        while done < segment.count:
            start = segment.start + done
            count = min(count_query_rows(group, span_of(start + QUERIES, capacity), served.rows), segment.count - done)
            stop = span_of(start + count, capacity)
            masks = self._mask_later_keys(start, count, stop)
            if window and start + count > window:
                rows = torch.arange(start, start + count).unsqueeze(1)
                hidden = torch.arange(start + count - window) <= rows - window
                masks = (*masks, ScoreMask(0, _make_mask(hidden)))
            yield Span(Segment(segment.slot, start, count), row + done, 0, stop, masks)
            done += count

    def _mask_later_keys(self, start: int, count: int, stop: int) -> tuple[ScoreMask, ...]:
        near = min(stop - start, self._later.shape[2])
        masks = [ScoreMask(start, self._later[:count, :, :near])]
        if start + near < stop:
            masks.append(ScoreMask(start + near, _make_mask(torch.ones(1, stop - start - near, dtype=torch.bool))))
        return tuple(masks)

    @staticmethod
    def _block_spans(
        row: int, segment: Segment, before: int, mask: AttentionMask, served: ServedHeads, capacity: int
    ) -> Iterator[Span]:
        """Cut the rows of a block into spans of few queries each, with the range of keys that they read.

        row: of the block's first query in the step. before: the first row of the context that the block sees. capacity:
        rows of the slot's cache. A sliding window is read from the key tile on in which it starts; masks hide what a
        query does not see.
        """
        end = segment.start + segment.count
        low = mask.lowest(before, segment.start)
        first = low // TILE * TILE
        keys = span_of(end - first, capacity)
        first = min(first, capacity - keys)
        together = count_query_rows(served.heads.group, keys, served.rows)
        for done in range(0, segment.count, together):
            rows = torch.arange(segment.start + done, min(segment.start + done + together, end)).unsqueeze(1)
            masks = []
            if low > first:
                masks.append(ScoreMask(first, _make_mask(torch.ones(1, low - first, dtype=torch.bool))))
            if mask.window:
                masks.append(ScoreMask(low, _make_mask(torch.arange(low, end) <= rows - mask.window)))
            last = rows if mask.causal else rows.new_tensor([[end - 1]])
            masks.append(ScoreMask(segment.start, _make_mask(torch.arange(segment.start, first + keys) > last)))
            part = evolve(segment, start=segment.start + done, count=len(rows))
            yield Span(part, row + done, first, first + keys, tuple(masks))

    def _attend_spans(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        spans: list[Span],
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        if len(spans) == 1 and spans[0].segment.count == batch.bucket:
            return self._attend_span(q, k_cache, v_cache, spans[0], rule).to(self.dtype)
        out = self._output_buffer(q, batch)
        for span in spans:
            out.narrow(0, span.row, span.segment.count).copy_(self._attend_span(q, k_cache, v_cache, span, rule))
        return out

    def _output_buffer(self, q: Tensor, batch: Batch) -> Tensor:
        size = (batch.bucket, q[0].numel())
        out = self._outputs.get(size)
        if out is None:
            out = self._outputs[size] = torch.zeros(size, dtype=self.dtype)
        return out

    def _attend_span(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, rule: AttentionRule) -> Tensor:
        """Attend over one span: `[count, H hd]`, float32 or in the dtype of products.

        The heads of a group go together, so that keys and values are read once. Scores are float32 in every dtype:
        rounded to bfloat16 they would be the coarsest step of the whole model.
        """
        count = span.segment.count
        keys = span.stop - span.first
        how = self._find_proven(*q.shape[2:])
        k_form = format_of(k_cache)
        v_form = format_of(v_cache)
        k_slot = k_cache.select(0, span.segment.slot).narrow(1, span.first, keys)
        v_slot = v_cache.select(0, span.segment.slot).narrow(1, span.first, keys)
        rows = q.narrow(0, span.row, count)
        group = q.shape[2]
        most = next((proven for proven in how.rows if proven >= count * group), 0)
        if not most:
            raise UnprovenProductError(f"attention of {count * group} query rows; proven: {how.rows}")
        parts = []
        for head in range(q.shape[1]):
            asking = rows.select(1, head).reshape(count * group, -1)
            if most > count * group:
                asking = torch.cat((asking, asking.new_zeros(most - count * group, asking.shape[1])))
            scores = self.kernels.multiply(asking, k_form.decode(k_slot.select(0, head)).float())
            if rule.cap:
                scores = apply_in_vectors(torch.tanh, scores / rule.cap).mul_(rule.cap)
            wide = scores.narrow(0, 0, count * group).view(count, group, keys)
            for mask in span.masks:
                wide.narrow(2, mask.key - span.first, mask.scores.shape[2]).add_(mask.scores)
            if rule.sinks is None:
                torch.softmax(scores, -1, out=scores)  # in place: large buffers that come and go cost page faults
            else:
                scores = _weigh_beside_sinks(scores, rule.sinks[head * group : (head + 1) * group].repeat(count))
            found = self._weigh_values(scores, v_form.decode(v_slot.select(0, head)), how)
            found = v_form.rotate(found.narrow(0, 0, count * group))  # which turns it back
            parts.append(found.reshape(count, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _weigh_values(self, weights: Tensor, values: Tensor, served: ServedHeads) -> Tensor:
        """Multiply weights float32 `[M, n]` with values `[n, hd]`; the sums of `terms` keys each are added up in
        float32.
        """
        dtype = getattr(torch, served.dtype)
        if len(values) <= served.terms:
            return self.kernels.multiply(weights.to(dtype), values.to(dtype).t())
        terms = zip(torch.split(weights, served.terms, 1), torch.split(values, served.terms), strict=True)
        first, *rest = (
            self.kernels.multiply(some.to(dtype).contiguous(), those.to(dtype).t()) for some, those in terms
        )
        total = first.float()
        for part in rest:
            total += part
        return total


def keep_values(attended: Tensor, q: Tensor, latent: int) -> Tensor:
    """Return what is attended, `[R, H hd]`, without the numbers of keys that belong to no value.

    q: the queries, `[R, KV, H / KV, hd]`. latent: as in `AttentionRule`.
    """
    return attended.view(len(q), -1, q.shape[3])[..., -latent:].flatten(1) if latent else attended


def _weigh_beside_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax of scores `[M, n]` with one more score for each of the first rows, whose weight is left out.

    It is the first of a whole vector of scores behind the keys. So it is added last, whatever the number of keys is.
    """
    more = scores.new_full((len(scores), VECTOR), -torch.inf)
    more[: len(sinks), 0] = sinks
    return torch.cat((scores, more), 1).softmax(-1)[:, : scores.shape[1]].contiguous()


def _make_mask(hidden: Tensor) -> Tensor:
    """Turn bool `[rows, keys]` into float32 `[rows, 1, keys]`, to be added to the scores of every head of a group."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)
