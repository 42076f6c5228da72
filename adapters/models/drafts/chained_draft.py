"""The base class of drafts with one layer whose rows each continue the hidden state of the row before.

Theory of operation. A row combines a token with a hidden state that came before this token. For rows that the target
has computed, the state is made from what the target's forward left: `extend` keeps the keys and values of these rows.
`propose` continues from the states that the draft itself computes, one forward for each proposal.

Rows lie at their tokens' positions. Published drafts count from the hidden states, one position earlier; rotary
embedding depends on differences only, so both give the same result. Therefore a block of rows depends on its own tokens
and on those before it, as the target's rows do.

A restored sequence must get the same proposals as one that is computed from the beginning. It may continue from
restored rows at multiples of 64, where no hidden state is there. So the context row at a multiple of 64 always takes
zeros instead of a hidden state. The states of the rows after it are kept for each slot (`kept_states.py`), because the
next row may be computed in another step. The first row of a proposal always takes the kept state of the row before it:
the target has computed that row in this process.

Example: rows 0 to 99 are computed. Row 64 took zeros. Rows 65 to 99 took the states of rows 64 to 98. Row 100 takes the
kept state of row 99.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from attrs import define, evolve, frozen
from torch import Tensor

from adapters.models.decoder.layers.attention_heads import finish_attention, select_heads
from adapters.models.decoder.layers.decoder_layer import DecoderLayer, LayerShape, finish_layer, load_layer
from adapters.models.decoder.layers.latent_layer import LatentLayer
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.pipeline.pipelined_chunks import use_device, use_inference_mode
from adapters.models.drafts.cached_draft import AnyHead, BlockRequest, count_cache_rows
from adapters.models.drafts.chained_batch import FIRST_KEPT, ChainedBatch, StateSource
from adapters.models.drafts.draft_parts import DraftPlacement, DraftShape, DraftWeights, LaunchPicks
from adapters.models.drafts.kept_states import KEPT_STATES, copy_kept_states
from adapters.models.drafts.sequential_draft import SequentialDraft
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Kernels
from adapters.models.kernels.interfaces.product_list import TILE, Heads
from adapters.models.kernels.step import Segment, Step

OWN_ROW = AttentionMask(causal=True)  # a row sees the context and itself


@frozen(eq=False)
class ChainedLayer:
    """The weights of the layer. kv, kv_prep: what context rows go through of its projection and preparation."""

    decoder: DecoderLayer
    kv: Any
    kv_prep: HeadPrep


class ChainedWeights(Protocol):
    """The weights that every kind has. norm: behind the layer."""

    @property
    def layer(self) -> ChainedLayer: ...

    @property
    def norm(self) -> Tensor: ...


W = TypeVar("W", bound=ChainedWeights)
C = TypeVar("C", bound=DraftShape)


def load_chained_layer(read: WeightReader, kernels: Kernels, shape: LayerShape, prefix: str) -> ChainedLayer:
    """Load the layer whose tensors begin with `prefix`."""
    decoder = load_layer(read, kernels, shape, prefix)
    bias = decoder.prep.bias
    queries = shape.num_heads * shape.head_dim
    kv = kernels.pack(read(*(f"{prefix}self_attn.{part}_proj.weight" for part in "kv")))
    return ChainedLayer(decoder, kv, evolve(decoder.prep, bias=None if bias is None else bias[queries:]))


def list_chained_heads(shape: LayerShape, block: int, capacity: int) -> tuple[Heads, ...]:
    """Return the attention of the layer. capacity: context rows of a slot."""
    return (Heads(shape.num_heads // shape.num_kv_heads, shape.head_dim, count_cache_rows(capacity, block, TILE)),)


@frozen(eq=False)
class EnteredLayer:
    """Rows as they enter the layer: the residual stream `[R, D]`, which may be changed in place, and what is projected
    to queries, keys and values.
    """

    residual: Tensor
    normed: Tensor


@define(eq=False)
class ChainedBuffers:
    """The static tensors of one bucket. given: what `extend` gets for each row, side by side."""

    batch: ChainedBatch
    given: Tensor
    logits: Tensor | None = None


class ChainedDraft(SequentialDraft[W], Generic[C, W]):
    """A draft of one layer over tokens and hidden states. See `CachedDraft` for the methods. C: its configuration's
    type.
    """

    def __init__(
        self,
        config: C,
        weights: DraftWeights,
        kernels: Kernels,
        head: AnyHead,
        placement: DraftPlacement | None = None,
    ) -> None:
        """Build the draft. head, placement: as in `CachedDraft`."""
        self._config = config
        super().__init__(config, weights, kernels, head, placement)

    @property
    def config(self) -> C:
        return self._config

    # --- what kinds differ in ---

    @property
    @abstractmethod
    def _eps(self) -> float:
        """The epsilon of all norms."""

    @abstractmethod
    def _count_given(self, *, projected: bool) -> int:
        """Return how many numbers `extend` gets for each row. projected: they are the features of a `Projection`."""

    @abstractmethod
    def _compute_states(self, loaded: W, given: Tensor, *, projected: bool) -> Tensor:
        """Return the hidden states `[R, D]` of the target's rows, from what `extend` got."""

    @abstractmethod
    def _enter_layer(self, loaded: W, batch: ChainedBatch) -> EnteredLayer:
        """Combine the batch's tokens with the hidden states at `batch.sources`."""

    @abstractmethod
    def _choose_state(self, residual: Tensor, normed: Tensor) -> Tensor:
        """Return the hidden state from which the next proposal continues: before or after the last norm."""

    @abstractmethod
    def _write_logits(self, loaded: W, normed: Tensor, logits: Tensor) -> None:
        """Write the head's float32 logits `[R, V]` of all tokens of the target."""

    def _find_first(self, request: BlockRequest) -> int:
        """Return the first context row that the proposals of a request may see."""
        return request.first

    # --- forwards ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        self._follow(step, tokens, [aux_hidden_states[layer] for layer in self.aux_layers], projected=False)

    def extend_projected(self, step: Step, tokens: Tensor, features: Tensor) -> None:
        """Do the same as `extend`, which needs the tokens' embeddings as well."""
        self._follow(step, tokens, [features], projected=True)

    def _follow(self, step: Step, tokens: Tensor, given: Sequence[Tensor], *, projected: bool) -> None:
        loaded = self._require_weights()
        self._check_step(step)
        buffers = self._find_buffers(step.bucket, projected=projected)
        name = "take" if projected else "extend"
        with use_inference_mode(), use_device(self._device):
            for states, own in zip(given, buffers.given.chunk(len(given), 1), strict=True):
                own[: len(states)].copy_(states)
            self._prepare(buffers.batch, step, tokens, [0] * len(step.segments), "step")
            self._kernels.launch(name, buffers.batch, lambda: self._run_context(loaded, buffers, projected=projected))

    def launch_proposals(self, requests: Sequence[BlockRequest], pick: LaunchPicks) -> Tensor:
        """Launch one forward and one pick for each proposal. The device moves the rows from one to the next itself.

        All requests get as many proposals as the one that asks for most: more rows of a step cost next to nothing.
        """
        loaded = self._require_weights()
        self._check_requests(requests)
        count = len(requests)
        most = max(request.count for request in requests)
        logits = self._run_draft_step(loaded, requests, [request.token for request in requests], 0)
        with use_inference_mode(), use_device(self._device):
            proposed = torch.empty(count, most, dtype=torch.int64, device=self._device)
            buffers = self._find_buffers(len(logits), projected=False)
            for draft_step in range(most):
                if draft_step:
                    buffers.batch.advance(proposed[:, draft_step - 1])
                    self._kernels.prepare_step(buffers.batch)
                    self._kernels.launch("propose", buffers.batch, partial(self._run_layer, loaded, buffers))
                proposed[:, draft_step].copy_(pick(logits[:count], draft_step))
        return proposed

    def _run_draft_step(
        self, loaded: W, asking: Sequence[BlockRequest], tokens: Sequence[int], draft_step: int
    ) -> Tensor:
        segments = tuple(Segment(request.slot, request.position + draft_step, 1) for request in asking)
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= len(segments)))
        buffers = self._find_buffers(step.bucket, projected=False)
        with use_inference_mode(), use_device(self._device):
            if buffers.logits is None:
                size = (step.bucket, len(self._head.embedding))
                buffers.logits = torch.full(size, -torch.inf, device=self._device)
            before = [self._find_first(request) for request in asking]
            source: StateSource = "draft" if draft_step else "kept"
            self._prepare(buffers.batch, step, torch.tensor(tokens[: len(asking)]), before, source)
            self._kernels.launch("propose", buffers.batch, partial(self._run_layer, loaded, buffers))
        return buffers.logits

    def _prepare(
        self, batch: ChainedBatch, step: Step, tokens: Tensor, before: Sequence[int], source: StateSource
    ) -> None:
        batch.before = tuple(before)
        batch.source = source
        batch.load(step, tokens)
        self._kernels.prepare_step(batch)

    def _run_context(self, loaded: W, buffers: ChainedBuffers, *, projected: bool) -> None:
        batch = buffers.batch
        states = self._compute_states(loaded, buffers.given, projected=projected)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(states)
        entered = self._enter_layer(loaded, batch)
        self._hidden.index_copy_(0, batch.kept_at, states)
        kv = self._kernels.linear(entered.normed, loaded.layer.kv)
        decoder = loaded.layer.decoder
        if isinstance(decoder, LatentLayer):
            kv = decoder.make_row(self._kernels, kv)
        [(k_cache, v_cache)] = self.rows.layers
        self._kernels.store(kv, loaded.layer.kv_prep, self._rope, batch, k_cache, v_cache)

    def _run_layer(self, loaded: W, buffers: ChainedBuffers) -> None:
        kernels = self._kernels
        batch = buffers.batch
        layer = loaded.layer.decoder
        [(k_cache, v_cache)] = self.rows.layers
        entered = self._enter_layer(loaded, batch)
        own = kernels.linear(entered.normed, layer.frame.projection)
        q = kernels.rotate_store(select_heads(kernels, layer, own), layer.prep, self._rope, batch, k_cache, v_cache)
        attended = kernels.attend_block(q, k_cache, v_cache, batch, OWN_ROW, layer.rule.latent)
        residual = entered.residual
        mixed = finish_attention(kernels, layer, attended, own)
        delta = finish_layer(kernels, layer.frame, residual, mixed, batch)
        normed = kernels.add_norm(residual, delta, loaded.norm, self._eps)
        self._hidden.narrow(0, batch.step_rows, batch.bucket).copy_(self._choose_state(residual, normed))
        assert buffers.logits is not None
        self._write_logits(loaded, normed, buffers.logits)

    def _embed_tokens(self, table: Tensor, batch: ChainedBatch, norm: Tensor) -> Tensor:
        """Return the normed embeddings of the batch's tokens."""
        embedded = self._kernels.embed(table, batch.tokens, self._hidden.new_empty(batch.bucket, table.shape[1]))
        return self._kernels.add_norm(embedded, None, norm, self._eps)

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        super().copy_rows(source, target, start, stop)
        copy_kept_states(self._hidden, FIRST_KEPT, self.rows.slots, source, target)

    # --- buffers ---

    def _make_buffers(self) -> None:
        """Allocate the hidden states. In order: one row of zeros, `KEPT_STATES` rows for each slot, one row that takes
        the states that are not kept, and the rows of the step.
        """
        self._buffers: dict[tuple[int, bool], ChainedBuffers] = {}
        rows = FIRST_KEPT + self.rows.slots * KEPT_STATES + 1 + self._buckets[-1]
        self._hidden = torch.zeros(rows, self.hidden_size, dtype=self._dtype, device=self._device)

    def _forget_buffers(self) -> None:
        self._buffers.clear()

    def _count_buffer_bytes(self) -> int:
        held = self._hidden.nbytes
        # Other threads call this as well, so it iterates over a copy.
        for buffers in tuple(self._buffers.values()):
            logits = 0 if buffers.logits is None else buffers.logits.nbytes
            held += buffers.batch.table.nbytes + buffers.given.nbytes + logits
        return held

    def _find_buffers(self, bucket: int, *, projected: bool) -> ChainedBuffers:
        if (bucket, projected) not in self._buffers:
            size = (bucket, self._count_given(projected=projected))
            given = torch.zeros(size, dtype=self._dtype, device=self._device)
            batch = ChainedBatch(bucket, self._device, self.rows.slots)
            self._buffers[bucket, projected] = ChainedBuffers(batch, given)
        return self._buffers[bucket, projected]
