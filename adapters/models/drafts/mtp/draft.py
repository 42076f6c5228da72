"""MTP: a model's own prediction head as a draft, asked again and again for the token after the one it said last.

A row of the head is made of a token's embedding and of the hidden state of the row before it, the target's last one
after its final norm: x = fc(norm(embedding) | norm(hidden)), one layer of attention over such rows, a norm, and the
target's own output head says what follows the token. Of rows that the target has computed only keys and values are
kept (`extend`); `propose` goes on from the hidden states that the head itself gives.

Rows stand at their tokens' positions (published heads count from the hidden states, one earlier, which rotary embedding
does not tell apart), so a block of rows depends on its own tokens and those before, as the target's does. Where a
sequence may be continued from kept rows alone, at multiples of 64, no hidden state is there: such a row always takes
zeros in its place, so a restored sequence is proposed the same tokens as a cold one. Of the rows since then the hidden
states are kept for each slot, as recurrent layers keep what they need of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.decoder_layer import WeightReader, finished, gated, projected
from adapters.models.decoder.pipelined_chunks import current, inference
from adapters.models.drafts.cached_draft import AnyHead, BlockRequest, CachedDraft, Pick
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.drafts.mtp.checkpoint import HeadConfig
from adapters.models.drafts.mtp.weights import LoadedHead, load_head
from adapters.models.kernels.interface import AttentionMask, Kernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import BlockBatch

KEPT = 64  # hidden states of a slot, of its last rows: sequences are continued at multiples of it
ALONE = AttentionMask(causal=True)  # a row sees the context and itself


@define(eq=False)
class HeadBatch(BlockBatch):
    """Two more views tell, as rows of `MtpDraft`'s hidden states,

    sources  where the hidden state of the row before is; 0, which is zeros, where there is none
    places   where the row's own one is kept; the row behind those of all slots where it is not
    chained, to be set before `load`: sources are what the head gave for the same rows of the step before.
    """

    slots_held: int
    chained: bool = field(init=False, default=False)
    sources: Tensor = field(init=False)
    places: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._padding = (*self._padding, 0, self.step_rows - 1)
        super().__attrs_post_init__()
        self.sources, self.places = self.table[6:].unbind(0)

    @property
    def step_rows(self) -> int:
        """Where the hidden states of the step's own rows begin."""
        return 2 + self.slots_held * KEPT

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        sources = list[int]()
        places = list[int]()
        for segment in step.segments:
            row = self.step_rows + len(sources)
            first = 1 + segment.slot * KEPT
            positions = range(segment.start, segment.start + segment.count)
            own = range(row, row + segment.count)
            if self.chained:
                sources += own
            else:
                before = [place - 1 if at % KEPT else 0 for place, at in zip(own, positions, strict=True)]
                if segment.start % KEPT:
                    before[0] = first + (segment.start - 1) % KEPT
                sources += before
            places += [self.step_rows - 1] * (segment.count - KEPT)
            places += [first + at % KEPT for at in positions[-KEPT:]]
        return *super()._columns(step), sources, places


@define(eq=False)
class HeadBuffers:
    """The static tensors of one bucket. last: what the target's last layer left, `[bucket, D]`."""

    batch: HeadBatch
    last: Tensor
    logits: Tensor | None = None


class MtpDraft(CachedDraft[LoadedHead]):
    """As `CachedDraft` says."""

    def __init__(
        self, config: HeadConfig, weights: DraftWeights, kernels: Kernels, head: AnyHead, **place: Any
    ) -> None:
        """head, place: of `CachedDraft`."""
        self._config = config
        self._eps = config.layer.rms_norm_eps
        super().__init__(config, weights, kernels, head, **place)

    @property
    def config(self) -> HeadConfig:
        return self._config

    @property
    def branches(self) -> bool:
        return False

    # --- forwards ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        loaded = self._loaded()
        self._check_step(step)
        buffers = self._at(step.bucket)
        with inference(), current(self._device):
            buffers.last.copy_(aux_hidden_states[self.aux_layers[0]])
            self._prepare(buffers.batch, step, tokens, [0] * len(step.segments), chained=False)
            self._kernels.launch("extend", buffers.batch, lambda: self._run_context(loaded, buffers))

    def take(self, step: Step, tokens: Tensor, features: Tensor) -> None:
        """What is projected here needs the tokens' embeddings, so features are the target's hidden states."""
        padded = torch.nn.functional.pad(features, (0, 0, 0, step.bucket - len(features)))
        self.extend(step, tokens, {self.aux_layers[0]: padded})

    def propose(self, requests: Sequence[BlockRequest], pick: Pick) -> None:
        """One forward for each place: those who want fewest drop out first."""
        loaded = self._loaded()
        self._check_requests(requests)
        order = sorted(range(len(requests)), key=lambda index: -requests[index].count)
        asking = [requests[index] for index in order]
        tokens = [request.token for request in asking]
        for place in range(asking[0].count):
            asking = [request for request in asking if request.count > place]
            logits = self._run_place(loaded, asking, tokens, place)
            parts = [logits[:0]] * len(requests)
            for row, index in enumerate(order[: len(asking)]):
                parts[index] = logits[row : row + 1]
            picked = pick(parts)
            tokens = [picked[index][0] for index in order[: len(asking)]]

    def rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Two places each: the first one goes on from the target, the others from the head."""
        for count in range(1, min(slots, rows // 2) + 1):
            yield [BlockRequest(slot, 0, 1, 0, 2) for slot in range(count)]

    def _run_place(
        self, loaded: LoadedHead, asking: Sequence[BlockRequest], tokens: Sequence[int], place: int
    ) -> Tensor:
        segments = tuple(Segment(request.slot, request.position + place, 1) for request in asking)
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= len(segments)))
        buffers = self._at(step.bucket)
        with inference(), current(self._device):
            if buffers.logits is None:
                buffers.logits = torch.zeros(step.bucket, len(self._head.embedding), device=self._device)
            before = [request.first for request in asking]
            self._prepare(buffers.batch, step, torch.tensor(tokens[: len(asking)]), before, chained=place > 0)
            self._kernels.launch("propose", buffers.batch, lambda: self._run_head(loaded, buffers))
        return buffers.logits

    def _prepare(self, batch: HeadBatch, step: Step, tokens: Tensor, before: Sequence[int], *, chained: bool) -> None:
        batch.before = tuple(before)
        batch.chained = chained
        batch.load(step, tokens)
        self._kernels.prepare_step(batch)

    def _run_context(self, loaded: LoadedHead, buffers: HeadBuffers) -> None:
        kernels = self._kernels
        batch = buffers.batch
        hidden = kernels.add_norm(buffers.last, None, self._head.norm, self._eps)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(hidden)
        x = self._joined(loaded, batch)
        self._hidden.index_copy_(0, batch.places, hidden)
        kv = kernels.linear(kernels.add_norm(x, None, loaded.layer.frame.input_norm, self._eps), loaded.kv)
        [(k_cache, v_cache)] = self._cache.layers
        kernels.store(kv, loaded.layer.prep, self._rope, batch, k_cache, v_cache)

    def _run_head(self, loaded: LoadedHead, buffers: HeadBuffers) -> None:
        kernels = self._kernels
        batch = buffers.batch
        layer = loaded.layer
        [(k_cache, v_cache)] = self._cache.layers
        x = self._joined(loaded, batch)
        own = projected(kernels, layer.frame, x, None)
        q = kernels.rotate_store(own[:, : layer.width], layer.prep, self._rope, batch, k_cache, v_cache)
        attended = kernels.attend_block(q, k_cache, v_cache, batch, ALONE)
        delta = finished(kernels, layer.frame, x, gated(kernels, layer, attended, own), batch)
        out = kernels.add_norm(x, delta, loaded.norm, self._eps)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(out)
        assert buffers.logits is not None
        buffers.logits.copy_(kernels.linear(out, self._head.packed))

    def _joined(self, loaded: LoadedHead, batch: HeadBatch) -> Tensor:
        """What the layer begins with, of the rows' tokens and the hidden states before them."""
        kernels = self._kernels
        eps = self._eps
        table = self._head.embedding
        embedded = kernels.embed(table, batch.tokens, self._hidden.new_empty(batch.bucket, table.shape[1]))
        embedded = kernels.add_norm(embedded, None, loaded.embedding_norm, eps)
        before = kernels.add_norm(self._hidden.index_select(0, batch.sources), None, loaded.hidden_norm, eps)
        return kernels.linear(torch.cat((embedded, before), 1), loaded.fc)

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        super().copy_rows(source, target, start, stop)
        slots = torch.unflatten(self._hidden.narrow(0, 1, self._cache.slots * KEPT), 0, (-1, KEPT))
        slots[target].copy_(slots[source])

    # --- weights and buffers ---

    def _load(self, read: WeightReader, weights: DraftWeights) -> LoadedHead:  # noqa: ARG002 - read is of them
        return load_head(read, self._kernels, self._config)

    def _make_buffers(self) -> None:
        """Hidden states: zeros, those of every slot's last rows, whatever is not kept, those of the step."""
        self._buffers: dict[int, HeadBuffers] = {}
        rows = 2 + self._cache.slots * KEPT + self._buckets[-1]
        self._hidden = torch.zeros(rows, self._config.hidden_size, dtype=self._dtype, device=self._device)

    def _forget_buffers(self) -> None:
        self._buffers.clear()

    def _buffers_bytes(self) -> int:
        held = self._hidden.nbytes
        for one in tuple(self._buffers.values()):  # asked from other threads, too
            held += one.batch.table.nbytes + one.last.nbytes + (0 if one.logits is None else one.logits.nbytes)
        return held

    def _at(self, bucket: int) -> HeadBuffers:
        if bucket not in self._buffers:
            last = torch.zeros(bucket, self._config.hidden_size, dtype=self._dtype, device=self._device)
            self._buffers[bucket] = HeadBuffers(HeadBatch(bucket, self._device, self._cache.slots), last)
        return self._buffers[bucket]
