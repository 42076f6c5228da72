"""MTP: a model's own prediction head as a draft, which predicts one token after the other.

Theory of operation. A row of the head combines the embedding of a token with the hidden state of the row before it:

    x = fc(norm(embedding) | norm(hidden))

For rows that the target has computed, `hidden` is the target's last hidden state, in most families after the final norm
(`HeadInputs`). One attention layer runs over such rows, then a norm, and the target's own output head predicts the
token that follows. `extend` keeps only the keys and values of rows that the target has computed. `propose` continues
from the hidden states that the head itself computes, one forward for each proposal. If the target's layers keep
compressed rows, the layer of the head keeps such rows as well.

Rows lie at their tokens' positions. Published heads count from the hidden states, one position earlier; rotary
embedding depends on differences only, so both give the same result. Therefore a block of rows depends on its own tokens
and on those before it, as the target's rows do.

A restored sequence must get the same proposals as one that is computed from the beginning. It may continue from
restored rows at multiples of 64, where no hidden state is there. So the row at a multiple of 64 always takes zeros
instead of a hidden state. The hidden states of the rows after it are kept for each slot (`KEPT_STATES`), because the
next row may be computed in another step.

Example: rows 0 to 99 are computed. Row 64 took zeros. Rows 65 to 99 took the hidden states of rows 64 to 98. Row 100
takes the kept hidden state of row 99.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.attention_heads import finish_attention, select_heads
from adapters.models.decoder.decoder_layer import finish_layer, project_inputs
from adapters.models.decoder.latent_layer import LatentLayer
from adapters.models.decoder.pipelined_chunks import use_device, use_inference_mode
from adapters.models.decoder.weight_reader import WeightReader
from adapters.models.drafts.cached_draft import AnyHead, BlockRequest, CachedDraft, ChooseTokens
from adapters.models.drafts.draft_parts import DraftPlacement, DraftWeights
from adapters.models.drafts.mtp.checkpoint import HeadConfig
from adapters.models.drafts.mtp.weights import LoadedHead, load_head
from adapters.models.kernels.attention_rule import AttentionMask
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import BlockBatch

# The hidden states that a slot keeps, those of its last rows. Restored sequences continue at multiples of this number.
KEPT_STATES = 64
OWN_ROW = AttentionMask(causal=True)  # a row sees the context and itself


@define(eq=False)
class HeadBatch(BlockBatch):
    """A batch with two more views. Their values are row numbers of `MtpDraft._hidden`.

    sources  the row with the hidden state of the row before; 0, whose values are zeros, if there is none.
    kept_at  the row that keeps this row's own hidden state; the row behind those of all slots if it is not kept.

    chained: set it before `load`. If true, the sources are the states that the head computed for the same rows in its
    previous forward.
    """

    slots_held: int
    chained: bool = field(init=False, default=False)
    sources: Tensor = field(init=False)
    kept_at: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._padding = (*self._padding, 0, self.step_rows - 1)
        super().__attrs_post_init__()
        self.sources, self.kept_at = self.table[6:].unbind(0)

    @property
    def step_rows(self) -> int:
        """The first row with hidden states of the step's own rows."""
        return 2 + self.slots_held * KEPT_STATES

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        sources = list[int]()
        targets = list[int]()
        for segment in step.segments:
            row = self.step_rows + len(sources)
            first = 1 + segment.slot * KEPT_STATES
            positions = range(segment.start, segment.start + segment.count)
            own = range(row, row + segment.count)
            if self.chained:
                sources += own
            else:
                before = [
                    draft_step - 1 if at % KEPT_STATES else 0 for draft_step, at in zip(own, positions, strict=True)
                ]
                if segment.start % KEPT_STATES:
                    before[0] = first + (segment.start - 1) % KEPT_STATES
                sources += before
            targets += [self.step_rows - 1] * (segment.count - KEPT_STATES)
            targets += [first + at % KEPT_STATES for at in positions[-KEPT_STATES:]]
        return *super()._columns(step), sources, targets


@define(eq=False)
class HeadBuffers:
    """The static tensors of one bucket. last: the output of the target's last layer, `[bucket, D]`."""

    batch: HeadBatch
    last: Tensor
    logits: Tensor | None = None


class MtpDraft(CachedDraft[LoadedHead]):
    """A prediction head as a draft. See `CachedDraft` for the methods."""

    def __init__(
        self,
        config: HeadConfig,
        weights: DraftWeights,
        kernels: Kernels,
        head: AnyHead,
        placement: DraftPlacement | None = None,
    ) -> None:
        """Build the draft. head, placement: as in `CachedDraft`."""
        self._config = config
        self._eps = config.layer.rms_norm_eps
        super().__init__(config, weights, kernels, head, placement)

    @property
    def config(self) -> HeadConfig:
        return self._config

    @property
    def can_branch(self) -> bool:
        return False

    @property
    def keeps_latents(self) -> bool:
        return self._config.layer.latent is not None

    # --- forwards ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        loaded = self._require_weights()
        self._check_step(step)
        buffers = self._find_buffers(step.bucket)
        with use_inference_mode(), use_device(self._device):
            buffers.last.copy_(aux_hidden_states[self.aux_layers[0]])
            self._prepare(buffers.batch, step, tokens, [0] * len(step.segments), chained=False)
            self._kernels.launch("extend", buffers.batch, lambda: self._run_context(loaded, buffers))

    def extend_projected(self, step: Step, tokens: Tensor, features: Tensor) -> None:
        """Do the same as `extend`. The features are the target's hidden states: the head needs the embeddings first."""
        padded = torch.nn.functional.pad(features, (0, 0, 0, step.bucket - len(features)))
        self.extend(step, tokens, {self.aux_layers[0]: padded})

    def propose(self, requests: Sequence[BlockRequest], pick: ChooseTokens) -> None:
        """Run one forward for each proposal. Requests with the fewest proposals leave first."""
        loaded = self._require_weights()
        self._check_requests(requests)
        order = sorted(range(len(requests)), key=lambda index: -requests[index].count)
        asking = [requests[index] for index in order]
        tokens = [request.token for request in asking]
        for draft_step in range(asking[0].count):
            asking = [request for request in asking if request.count > draft_step]
            logits = self._run_draft_step(loaded, asking, tokens, draft_step)
            parts = [logits[:0]] * len(requests)
            for row, index in enumerate(order[: len(asking)]):
                parts[index] = logits[row : row + 1]
            picked = pick(parts)
            tokens = [picked[index][0] for index in order[: len(asking)]]

    def list_rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Return requests of two proposals each: the first continues from the target, the second from the head."""
        for count in range(1, min(slots, rows // 2) + 1):
            yield [BlockRequest(slot, 0, 1, 0, 2) for slot in range(count)]

    def _run_draft_step(
        self, loaded: LoadedHead, asking: Sequence[BlockRequest], tokens: Sequence[int], draft_step: int
    ) -> Tensor:
        segments = tuple(Segment(request.slot, request.position + draft_step, 1) for request in asking)
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= len(segments)))
        buffers = self._find_buffers(step.bucket)
        with use_inference_mode(), use_device(self._device):
            if buffers.logits is None:
                buffers.logits = torch.zeros(step.bucket, len(self._head.embedding), device=self._device)
            before = [request.first for request in asking]
            self._prepare(buffers.batch, step, torch.tensor(tokens[: len(asking)]), before, chained=draft_step > 0)
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
        hidden = buffers.last
        if self._config.inputs.is_normed:
            hidden = kernels.add_norm(hidden, None, self._head.norm, self._eps)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(hidden)
        x = self._join_inputs(loaded, batch)
        self._hidden.index_copy_(0, batch.kept_at, hidden)
        layer = loaded.layer
        kv = kernels.linear(kernels.add_norm(x, None, layer.frame.input_norm, self._eps), loaded.kv)
        if isinstance(layer, LatentLayer):
            kv = layer.make_row(kernels, kv)
        [(k_cache, v_cache)] = self.rows.layers
        kernels.store(kv, loaded.kv_prep, self._rope, batch, k_cache, v_cache)

    def _run_head(self, loaded: LoadedHead, buffers: HeadBuffers) -> None:
        kernels = self._kernels
        batch = buffers.batch
        layer = loaded.layer
        [(k_cache, v_cache)] = self.rows.layers
        x = self._join_inputs(loaded, batch)
        own = project_inputs(kernels, layer.frame, x, None)
        q = kernels.rotate_store(select_heads(kernels, layer, own), layer.prep, self._rope, batch, k_cache, v_cache)
        attended = kernels.attend_block(q, k_cache, v_cache, batch, OWN_ROW, layer.rule.latent)
        delta = finish_layer(kernels, layer.frame, x, finish_attention(kernels, layer, attended, own), batch)
        out = kernels.add_norm(x, delta, loaded.norm, self._eps)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(out)
        assert buffers.logits is not None
        buffers.logits.copy_(kernels.linear(out, self._head.packed))

    def _join_inputs(self, loaded: LoadedHead, batch: HeadBatch) -> Tensor:
        """Return the layer's input, from the rows' tokens and the hidden states of the rows before them."""
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
        slots = torch.unflatten(self._hidden.narrow(0, 1, self.rows.slots * KEPT_STATES), 0, (-1, KEPT_STATES))
        slots[target].copy_(slots[source])

    # --- weights and buffers ---

    def _load_weights(self, read: WeightReader, weights: DraftWeights) -> LoadedHead:  # noqa: ARG002 - `read` reads from them
        return load_head(read, self._kernels, self._config)

    def _make_buffers(self) -> None:
        """Allocate the hidden states. In order: one row of zeros, `KEPT_STATES` rows for each slot, one row that takes
        the states that are not kept, and the rows of the step.
        """
        self._buffers: dict[int, HeadBuffers] = {}
        rows = 2 + self.rows.slots * KEPT_STATES + self._buckets[-1]
        self._hidden = torch.zeros(rows, self._config.hidden_size, dtype=self._dtype, device=self._device)

    def _forget_buffers(self) -> None:
        self._buffers.clear()

    def _count_buffer_bytes(self) -> int:
        held = self._hidden.nbytes
        # Other threads call this as well, so it iterates over a copy.
        for buffers in tuple(self._buffers.values()):
            logits = 0 if buffers.logits is None else buffers.logits.nbytes
            held += buffers.batch.table.nbytes + buffers.last.nbytes + logits
        return held

    def _find_buffers(self, bucket: int) -> HeadBuffers:
        if bucket not in self._buffers:
            last = torch.zeros(bucket, self._config.hidden_size, dtype=self._dtype, device=self._device)
            self._buffers[bucket] = HeadBuffers(HeadBatch(bucket, self._device, self.rows.slots), last)
        return self._buffers[bucket]
