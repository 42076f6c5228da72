"""A Gemma 4 assistant: a small draft that attends to the rows of its target, and has none of its own.

Theory of operation. An assistant predicts one token after the other, as a prediction head does. A row combines the
target's embedding of a token with a hidden state of the target's size:

    x = before(embedding | hidden)

A few layers run over x. They have queries only: each reads keys and values that a layer of the target has written, the
last one of its kind. Then there is a norm. The assistant's own head predicts the next token, and `after` makes the
hidden state of the next proposal. For the first proposal the hidden state is that of the target's last row.

All proposals of a block attend from the same position, that of the slot's last token. The target has not computed the
row there, so they see the rows before it. Kernels let a row see its own position. Therefore queries attend from one
position earlier, and the rotary tables are shifted by one: the table at p holds the angles of p + 1.

`extend` keeps hidden states alone, those of the last rows of each slot. The last row of a slot was always computed in
this process, also after a restart. So a restored sequence gets the same proposals as one computed from the beginning.

Example: rows 0 to 99 are computed and the last token is at position 100. The assistant gets its embedding and the
hidden state of row 99, and reads rows 0 to 99 of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.layers.decoder_layer import end_layer, project_inputs
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.pipeline.pipelined_chunks import use_device, use_inference_mode
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.assistant.config import AssistantConfig
from adapters.models.drafts.assistant.weights import LoadedAssistant, load_assistant
from adapters.models.drafts.cached_draft import AnyHead, BlockRequest
from adapters.models.drafts.draft_parts import DraftPlacement, DraftWeights
from adapters.models.drafts.kept_states import KEPT_STATES, copy_kept_states, find_kept_row, list_target_rows
from adapters.models.drafts.sequential_draft import SequentialDraft
from adapters.models.kernels.interfaces.layer_interface import Kernels, Rope
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch


@define(eq=False)
class AssistantBatch(Batch):
    """A batch with two more views. Their values are row numbers of `AssistantDraft._hidden`.

    sources  the row with the hidden state that this row continues.
    kept_at  the row that keeps this row's own hidden state; the row behind those of all slots if it is not kept.

    chained: set it before `load`. If true, the sources are the states that the assistant made in its last forward.
    """

    slots_held: int
    chained: bool = field(init=False, default=False)
    sources: Tensor = field(init=False)
    kept_at: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._padding = (*self._padding, 0, self.step_rows - 1)
        super().__attrs_post_init__()
        self.sources, self.kept_at = self.table[4:].unbind(0)

    @property
    def step_rows(self) -> int:
        """The first row with hidden states of the step's own rows."""
        return self.slots_held * KEPT_STATES + 1

    def _columns(self, step: Step) -> tuple[list[int], ...]:
        sources = list[int]()
        targets = list[int]()
        for segment in step.segments:
            positions = range(segment.start, segment.start + segment.count)
            row = self.step_rows + len(sources)
            if self.chained:
                sources += range(row, row + segment.count)
            else:
                sources += [find_kept_row(0, segment.slot, position) for position in positions]
            targets += list_target_rows(0, segment, self.step_rows - 1)
        return *super()._columns(step), sources, targets


@define(eq=False)
class AssistantBuffers:
    """The static tensors of one bucket. last: the output of the target's last layer, `[bucket, D]`."""

    batch: AssistantBatch
    last: Tensor
    logits: Tensor | None = None


class AssistantDraft(SequentialDraft[LoadedAssistant]):
    """An assistant as a draft. See `CachedDraft` for the methods. It needs the target's rows on its own device."""

    def __init__(
        self,
        config: AssistantConfig,
        weights: DraftWeights,
        kernels: Kernels,
        head: AnyHead,
        placement: DraftPlacement | None = None,
    ) -> None:
        """Build the draft. head, placement: as in `CachedDraft`. ValueError if the target's rows are elsewhere."""
        self._config = config
        self._eps = config.layers.rms_norm_eps
        if not isinstance(head, TargetHead) or head.find_caches is None:
            raise ValueError("an assistant reads its target's rows, so it must be on the device of the last layers")
        self._find_caches = head.find_caches
        super().__init__(config, weights, kernels, head, placement)

    @property
    def config(self) -> AssistantConfig:
        return self._config

    # --- forwards ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        self._require_weights()
        self._check_step(step)
        buffers = self._find_buffers(step.bucket)
        with use_inference_mode(), use_device(self._device):
            buffers.last.copy_(aux_hidden_states[self.aux_layers[0]])
            self._prepare(buffers.batch, step, tokens, chained=False)
            self._kernels.launch("extend", buffers.batch, lambda: self._keep_states(buffers))

    def extend_projected(self, step: Step, tokens: Tensor, features: Tensor) -> None:
        """Do the same as `extend`. The features are the target's hidden states."""
        padded = torch.nn.functional.pad(features, (0, 0, 0, step.bucket - len(features)))
        self.extend(step, tokens, {self.aux_layers[0]: padded})

    def _run_draft_step(
        self, loaded: LoadedAssistant, asking: Sequence[BlockRequest], tokens: Sequence[int], draft_step: int
    ) -> Tensor:
        segments = tuple(Segment(request.slot, max(0, request.position - 1), 1) for request in asking)
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= len(segments)))
        buffers = self._find_buffers(step.bucket)
        with use_inference_mode(), use_device(self._device):
            if buffers.logits is None:
                buffers.logits = torch.zeros(step.bucket, len(self._head.embedding), device=self._device)
            self._prepare(buffers.batch, step, torch.tensor(tokens[: len(asking)]), chained=draft_step > 0)
            self._kernels.launch("propose", buffers.batch, lambda: self._run_layers(loaded, buffers))
        return buffers.logits

    def _prepare(self, batch: AssistantBatch, step: Step, tokens: Tensor, *, chained: bool) -> None:
        batch.chained = chained
        batch.load(step, tokens)
        self._kernels.prepare_step(batch)

    def _keep_states(self, buffers: AssistantBuffers) -> None:
        hidden = self._kernels.add_norm(buffers.last, None, self._head.norm, self._eps)
        self._hidden.index_copy_(0, buffers.batch.kept_at, hidden)

    def _run_layers(self, loaded: LoadedAssistant, buffers: AssistantBuffers) -> None:
        """Compute the next token's logits of all rows of a step, into `buffers.logits`.

        The rows' hidden states are left in `_hidden` from `step_rows` on, where the next step of the chain reads them.
        """
        kernels = self._kernels
        batch = buffers.batch
        table = self._head.embedding
        embedded = kernels.embed(table, batch.tokens, self._hidden.new_empty(batch.bucket, table.shape[1]))
        x = kernels.linear(torch.cat((embedded, self._hidden.index_select(0, batch.sources)), 1), loaded.before)
        for number, layer in enumerate(loaded.layers):
            assert layer.source is not None
            assert layer.ending is not None
            k_cache, v_cache, pages = self._find_caches(layer.source)
            seen = batch.with_pages(pages)
            rope = self._ropes[self._config.layers.shape_of(number).rotary]
            own = project_inputs(kernels, layer.frame, x, None)
            q = kernels.rotate_queries(own, layer.prep, rope, seen, k_cache)
            attended = kernels.attend(q, k_cache, v_cache, seen, layer.rule)
            end_layer(kernels, layer, x, attended, batch, inputs=None)
        out = kernels.add_norm(x, None, loaded.norm, self._eps)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(kernels.linear(out, loaded.after))
        assert buffers.logits is not None
        buffers.logits.copy_(kernels.linear(out, loaded.head))

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        super().copy_rows(source, target, start, stop)
        copy_kept_states(self._hidden, 0, self.rows.slots, source, target)

    # --- weights and buffers ---

    def _make_ropes(self, count: int) -> Mapping[Rotary, Rope]:
        """Return tables that are shifted by one position."""
        layers = self._config.layers
        found = dict[Rotary, Rope]()
        for rotary in {layers.shape_of(layer).rotary for layer in range(layers.num_layers)}:
            whole = rotary.tables(count + 1, self._device)
            found[rotary] = Rope(whole.cos[1:], whole.sin[1:])
        return found

    def _load_weights(self, read: WeightReader, weights: DraftWeights, head: TargetHead) -> LoadedAssistant:  # noqa: ARG002
        wide = WeightReader(weights, self._device, self._dtype, wide_norms=True)
        return load_assistant(wide, self._kernels, self._config)

    def _make_buffers(self) -> None:
        """Allocate the hidden states. In order: `KEPT_STATES` rows for each slot, one row that takes the states that
        are not kept, and the rows of the step.
        """
        self._buffers: dict[int, AssistantBuffers] = {}
        rows = self.rows.slots * KEPT_STATES + 1 + self._buckets[-1]
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

    def _find_buffers(self, bucket: int) -> AssistantBuffers:
        if bucket not in self._buffers:
            last = torch.zeros(bucket, self._config.hidden_size, dtype=self._dtype, device=self._device)
            self._buffers[bucket] = AssistantBuffers(AssistantBatch(bucket, self._device, self.rows.slots), last)
        return self._buffers[bucket]
