"""DFlash: a draft that proposes a block of tokens at once.

Theory of operation. A draft that predicts one token after the other runs one forward for each proposal. DFlash instead
runs one forward over a block `[token, MASK, MASK, ...]`: row j gives the logits of the token j positions on. The block
attends to context rows that are computed from hidden states of the target, so the draft knows what the target knows.

`extend` computes the context rows, once for each row of the target. From the outputs of the target's auxiliary layers
it makes keys and values of every draft layer, which are cached like the target's own:

    H = norm(fc(aux)),  k = rotate(norm(Wk H)),  v = Wv H

`propose` embeds the block behind a slot's context rows and runs the draft's layers over it. The keys and values of the
block are written behind the context rows. The next `extend` overwrites them.

Invariant: the bits of a context row do not depend on the bucket, the chunk or the other rows of its forward. The bits
of a block do not depend on the other blocks. So a restored or batched sequence gets the same proposals as one that is
computed alone from the beginning.

Example: context rows [0, 100) are valid, the slot's last token is at position 100, and 5 proposals are requested. The
block has 8 rows, at positions 100 to 107. Its rows 1 to 5 give the logits of positions 101 to 105. In a block of DSpark
the logits of a position come from the row before it.

DFlash 2 and DSpark also correct the logits of each place by the token before it (`correction.py`), so they propose
chains and no trees. DFlash 2 has a convolution around the parts of a layer (`convolution.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import define
from torch import Tensor

from adapters.models.decoder.layers.layer_buffers import whole_layer
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.pipeline.pipelined_chunks import use_device, use_inference_mode
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import AnyHead, BlockRequest, CachedDraft, ChooseTokens
from adapters.models.drafts.dflash.block_layer import BlockAttention, run_block_layer
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.correction import BlockOutput, PaddedProducts, pick_in_order
from adapters.models.drafts.dflash.draft_blocks import MOST_ROWS, BlockSizes
from adapters.models.drafts.dflash.weights import LoadedDraft, load_draft
from adapters.models.drafts.draft_parts import DraftPlacement, DraftWeights
from adapters.models.kernels.interfaces.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.interfaces.experts_interface import GatedWeights
from adapters.models.kernels.interfaces.fused_layers import Embedding, FusedLayers
from adapters.models.kernels.interfaces.layer_interface import (
    ContextLayer,
    ContextPass,
    FusedContext,
    Kernels,
    WholeLayer,
)
from adapters.models.kernels.step import Forward, Segment, Step
from adapters.models.kernels.step_batch import Batch, BlockBatch


@define(eq=False)
class ContextBuffers:
    """The static tensors of one bucket of `extend`.

    given: the outputs of the auxiliary layers, side by side, `[bucket, K D]`; or the features that a projection has
    computed from them, `[bucket, D]`.
    """

    batch: Batch
    given: Tensor
    fused_layers: FusedContext | None


@define(eq=False)
class BlockBuffers:
    """The static tensors of one bucket of `propose`. hidden: `[bucket, D]`; logits: float32 `[bucket, V]`; features:
    `[bucket, F]`, for the draft's correction.
    """

    batch: BlockBatch
    hidden: Tensor
    logits: Tensor
    features: Tensor
    fused_layers: FusedLayers | None


class DFlashDraft(CachedDraft[LoadedDraft]):
    """A DFlash draft. Its blocks lie behind the context rows of their slots. See `CachedDraft` for the methods."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: DraftWeights,
        kernels: Kernels,
        head: AnyHead,
        placement: DraftPlacement | None = None,
    ) -> None:
        """Build the draft. head, placement: as in `CachedDraft`."""
        self._config = config
        self._sizes = BlockSizes(config.rows, config.lead)
        super().__init__(config, weights, kernels, head, placement)

    def _check_head(self, head: TargetHead) -> None:
        super()._check_head(head)
        if self._config.mask_token_id >= len(head.embedding):
            raise ValueError(f"mask token {self._config.mask_token_id} is not in 0..{len(head.embedding) - 1}")

    @property
    def config(self) -> DFlashConfig:
        return self._config

    # --- forwards ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:  # noqa: ARG002
        """Write the context rows. They depend on their tokens only through the target's hidden states."""
        loaded = self._require_weights()
        self._check_step(step)
        buffers = self._find_context_buffers(step.bucket, len(self.aux_layers))
        with use_inference_mode(), use_device(self._device):
            given = [aux_hidden_states[layer] for layer in self.aux_layers]
            here = [states if states.device == self._device else states.to(self._device) for states in given]
            torch.cat(here, 1, out=buffers.given)
            buffers.batch.load(step, None)
            self._kernels.prepare_step(buffers.batch)
            self._kernels.launch("extend", buffers.batch, lambda: self._run_context(loaded, buffers))

    def extend_projected(self, step: Step, tokens: Tensor, features: Tensor) -> None:  # noqa: ARG002 - as in `extend`
        loaded = self._require_weights()
        self._check_step(step)
        buffers = self._find_context_buffers(step.bucket, 1)
        with use_inference_mode(), use_device(self._device):
            buffers.given[: step.rows].copy_(features)
            buffers.batch.load(step, None)
            self._kernels.prepare_step(buffers.batch)
            self._kernels.launch("take", buffers.batch, lambda: self._store_rows(loaded, buffers, buffers.given))

    def propose(self, requests: Sequence[BlockRequest], pick: ChooseTokens) -> None:
        """Compute the logits of all proposals, and call `pick` once; or once for each place if they are corrected."""
        correction = self._require_weights().correction
        blocks = self._compute_blocks(requests)
        if correction is None:
            pick([block.logits for block in blocks])
            return
        with use_device(self._device):
            walk = correction.begin(blocks, PaddedProducts(self._kernels, self._buckets))
            pick_in_order(walk, requests, pick, self._device)

    def logits(self, requests: Sequence[BlockRequest]) -> Tensor:
        """Return float32 logits `[sum of counts, V]` without corrections: for each request in turn its proposals' rows.

        The result may be a static buffer, so it must be read before the next call. A block has the smallest of 4, 8,
        16, ... B rows that holds the proposals.
        """
        parts = [block.logits for block in self._compute_blocks(requests)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute_blocks(self, requests: Sequence[BlockRequest]) -> list[BlockOutput]:
        """Return what the forward gives for each request."""
        loaded = self._require_weights()
        sizes = self._sizes
        self._check_requests(requests)
        together = list(sizes.group_requests(requests, max(sizes.most, min(MOST_ROWS, self._buckets[-1]))))
        found = list[BlockOutput]()
        for turn in together:
            segments = tuple(
                [Segment(request.slot, request.position, sizes.count_rows(request.count)) for request in turn]
            )
            buffers = self._run_turn(loaded, turn, segments)
            row = sizes.lead
            for request, segment in zip(turn, segments, strict=True):
                parts = [rows[row : row + request.count] for rows in (buffers.logits, buffers.features)]
                found.append(BlockOutput(*(parts if len(together) == 1 else [rows.clone() for rows in parts])))
                row += segment.count
        return found

    def _run_turn(
        self, loaded: LoadedDraft, requests: Sequence[BlockRequest], segments: tuple[Segment, ...]
    ) -> BlockBuffers:
        total = 0
        tokens = list[int]()
        for request, segment in zip(requests, segments, strict=True):
            tokens += [request.token, *[self._config.mask_token_id] * (segment.count - 1)]
            total += segment.count
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= total))
        buffers = self._find_block_buffers(step.bucket)
        with use_inference_mode(), use_device(self._device):
            buffers.batch.before = tuple(request.first for request in requests)
            buffers.batch.load(step, tokens)
            self._kernels.prepare_step(buffers.batch)
            self._kernels.launch("propose", buffers.batch, lambda: self._run_block(loaded, buffers))
        return buffers

    def _run_context(self, loaded: LoadedDraft, buffers: ContextBuffers) -> None:
        kernels = self._kernels
        eps = self._config.rms_norm_eps
        if buffers.fused_layers is not None:
            buffers.fused_layers.run(buffers.given, buffers.batch)
            return
        context = kernels.add_norm(kernels.linear(buffers.given, loaded.fc), None, loaded.hidden_norm, eps)
        self._store_rows(loaded, buffers, context)

    def _store_rows(self, loaded: LoadedDraft, buffers: ContextBuffers, context: Tensor) -> None:
        kernels = self._kernels
        batch = buffers.batch
        for layer, (k_cache, v_cache) in zip(loaded.layers, self.rows.layers, strict=True):
            kv = kernels.linear(context, layer.kv)
            kernels.store(kv, layer.decoder.prep, self._rope, batch, k_cache, v_cache)

    def _run_block(self, loaded: LoadedDraft, buffers: BlockBuffers) -> None:
        kernels = self._kernels
        batch = buffers.batch
        residual = buffers.hidden
        delta: Tensor | None = None
        if buffers.fused_layers is not None:
            buffers.fused_layers.run(residual, batch, stops=False)
        else:
            self._embed(loaded, batch, residual)
            for layer, caches, mask in zip(loaded.layers, self.rows.layers, self._config.masks, strict=True):
                attention = BlockAttention(caches, mask, self._rope)
                delta = run_block_layer(kernels, layer, attention, residual, delta, batch=batch)
        if delta is None and loaded.correction is None:
            kernels.write_logits(residual, loaded.norm, self._config.rms_norm_eps, self._head.packed, buffers.logits)
        else:
            x = kernels.add_norm(residual, delta, loaded.norm, self._config.rms_norm_eps)
            buffers.logits.copy_(kernels.linear(x, self._head.packed))
            if loaded.correction is not None:
                buffers.features.copy_(loaded.correction.project(kernels, x))
        self._config.parts.scale.apply(buffers.logits)

    def _embed(self, loaded: LoadedDraft, batch: BlockBatch, residual: Tensor) -> None:
        """Write the embeddings of the block's tokens into `residual`."""
        self._kernels.embed(self._head.embedding, batch.tokens, out=residual)
        if loaded.mask is not None:
            masked = (batch.tokens == self._config.mask_token_id).unsqueeze(1)
            residual.copy_(torch.where(masked, loaded.mask, residual))
        if self._config.parts.embedding_scale != 1:
            residual.mul_(self._config.parts.embedding_scale)

    def build_draft_pass(self, count: int, target: DecodePass) -> DraftPass | None:
        """Return the pass that proposes `count` tokens within a decode step of the compiled library.

        It reads the hidden states that `target` leaves. None if the library cannot run all of it. The same pass is
        returned until the weights are offloaded.
        """
        if self._config.parts.is_corrected or not self._config.parts.scale.is_plain:
            return None
        rows = self._sizes.count_rows(count)
        if (rows, target) not in self._draft_passes:
            fits = rows in self._buckets and target.rows in self._buckets
            self._draft_passes[rows, target] = self._make_draft_pass(rows, target) if fits else None
        return self._draft_passes[rows, target]

    def _make_draft_pass(self, rows: int, target: DecodePass) -> DraftPass | None:
        loaded = self._require_weights()
        contexts = list[ContextPass]()
        for bucket in self._buckets[: self._buckets.index(target.rows) + 1]:
            context = self._find_context_buffers(bucket, len(self.aux_layers))
            if context.fused_layers is None:
                return None
            contexts.append(ContextPass(context.fused_layers, context.batch, context.given))
        own = self._find_block_buffers(rows)
        if own.fused_layers is None:
            return None
        ending = (loaded.norm, self._config.rms_norm_eps, self._head.packed)
        block = self._kernels.build_pass(own.fused_layers, ending, own.batch, Forward(own.hidden, {}), own.logits)
        if block is None:
            return None
        left = [target.forward.aux_hidden_states[layer] for layer in self.aux_layers]
        return self._kernels.build_draft_pass(block, contexts, left, self._config.mask_token_id)

    def list_rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Return blocks of every size for one slot, then full blocks for as many slots as a step holds."""
        lead = self._sizes.lead
        yield from ([BlockRequest(0, 0, 1, 0, size - lead)] for size in self._sizes.list_sizes())
        for count in range(2, min(slots, rows // self._sizes.most) + 1):
            yield [BlockRequest(slot, 0, 1, 0, self.block - 1) for slot in range(count)]

    # --- weights and buffers ---

    def _load_weights(self, read: WeightReader, weights: DraftWeights, head: TargetHead) -> LoadedDraft:  # noqa: ARG002
        return load_draft(read, weights, self._kernels, self._config)

    def _make_buffers(self) -> None:
        self._contexts: dict[tuple[int, int], ContextBuffers] = {}
        self._blocks: dict[int, BlockBuffers] = {}
        self._draft_passes: dict[tuple[int, DecodePass], DraftPass | None] = {}

    def _forget_buffers(self) -> None:
        self._contexts.clear()
        self._blocks.clear()
        self._draft_passes.clear()

    def _count_buffer_bytes(self) -> int:
        held = 0
        # Other threads call this as well, so it iterates over copies.
        for context in tuple(self._contexts.values()):
            held += context.batch.table.nbytes + context.given.nbytes
        for block in tuple(self._blocks.values()):
            held += block.batch.table.nbytes + block.hidden.nbytes + block.logits.nbytes + block.features.nbytes
        return held

    def _find_context_buffers(self, bucket: int, states: int) -> ContextBuffers:
        """Return the buffers of a bucket, allocated at first use. states: hidden states of D values that a row gets."""
        if (bucket, states) not in self._contexts:
            width = states * self._config.hidden_size
            given = torch.zeros(bucket, width, dtype=self._dtype, device=self._device)
            fused = self._fuse_context(bucket) if states == len(self.aux_layers) else None
            self._contexts[bucket, states] = ContextBuffers(Batch(bucket, self._device), given, fused)
        return self._contexts[bucket, states]

    def _find_block_buffers(self, bucket: int) -> BlockBuffers:
        if bucket not in self._blocks:
            hidden = torch.zeros(bucket, self._config.hidden_size, dtype=self._dtype, device=self._device)
            logits = torch.zeros(bucket, len(self._head.embedding), device=self._device)
            correction = self._require_weights().correction
            width = 0 if correction is None else correction.count_features(self._config.hidden_size)
            features = torch.zeros(bucket, width, dtype=self._dtype, device=self._device)
            fused = self._fuse_layers(bucket)
            self._blocks[bucket] = BlockBuffers(BlockBatch(bucket, self._device), hidden, logits, features, fused)
        return self._blocks[bucket]

    def _fuse_context(self, bucket: int) -> FusedContext | None:
        loaded = self._require_weights()
        layers = [
            ContextLayer(layer.kv, layer.decoder.prep, *caches)
            for layer, caches in zip(loaded.layers, self.rows.layers, strict=True)
        ]
        eps = self._config.rms_norm_eps
        return self._kernels.fuse_context(loaded.fc, loaded.hidden_norm, eps, layers, self._rope, bucket)

    def _fuse_layers(self, bucket: int) -> FusedLayers | None:
        loaded = self._require_weights()
        if self._config.parts.convolution is not None or self._config.parts.embedding_scale != 1:
            return None
        layers = list[WholeLayer]()
        for layer, caches, mask in zip(loaded.layers, self.rows.layers, self._config.masks, strict=True):
            feed = layer.decoder.frame.feed
            assert isinstance(feed, GatedWeights), "drafts are dense"
            layers.append(whole_layer(layer.decoder, feed, caches, mask=mask))
        embedding = Embedding(self._head.embedding, loaded.mask, self._config.mask_token_id)
        return self._kernels.fuse_layers(layers, self._rope, bucket, embedding)
