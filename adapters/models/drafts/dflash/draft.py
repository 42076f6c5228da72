"""DFlash: a draft that proposes a block of tokens at once, from context rows that the target's hidden states give.

Two things happen here. `extend` turns what the target's auxiliary layers left for each row into keys and values of
every draft layer: H = norm(fc(aux)), k = rotate(norm(Wk H)), v = Wv H, once a row, cached like the target's own.
`propose` embeds `[token, MASK, ...]` behind a slot's context and runs the draft's layers over it; row j gives the
logits of the token j places on. The block's own keys and values are written behind the context and forgotten by being
overwritten.

A context row's bits do not depend on the bucket, the chunk or the neighbours it was computed with, and a block's not on
the other blocks, so a restored or batched sequence is proposed the same tokens as a cold one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor

from adapters.models.decoder.decoder_layer import WeightReader, finished, projected
from adapters.models.decoder.layer_buffers import whole_layer
from adapters.models.decoder.pipelined_chunks import current, inference
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import AnyHead, BlockRequest, CachedDraft, Pick
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.draft_blocks import MOST_ROWS, SMALLEST_BLOCK, block_rows, turns
from adapters.models.drafts.dflash.weights import LoadedDraft, load_draft
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.kernels.decode_pass import DecodePass, DraftPass
from adapters.models.kernels.experts_interface import Experts
from adapters.models.kernels.interface import (
    ContextLayer,
    ContextPass,
    Embedding,
    FusedContext,
    FusedLayers,
    Kernels,
    WholeLayer,
)
from adapters.models.kernels.step import Forward, Segment, Step
from adapters.models.kernels.step_batch import Batch, BlockBatch


@define(eq=False)
class ContextBuffers:
    """The static tensors of one bucket. given: what the target left, side by side, `[bucket, K D]`, or what a
    projection has made of that, `[bucket, D]`.
    """

    batch: Batch
    given: Tensor
    fused_layers: FusedContext | None


@define(eq=False)
class BlockBuffers:
    """The static tensors of one bucket of `propose`. hidden: `[bucket, D]`; logits: float32 `[bucket, V]`."""

    batch: BlockBatch
    hidden: Tensor
    logits: Tensor
    fused_layers: FusedLayers | None


class DFlashDraft(CachedDraft[LoadedDraft]):
    """As `CachedDraft` says; its blocks are behind the context rows of their slots."""

    def __init__(
        self, config: DFlashConfig, weights: DraftWeights, kernels: Kernels, head: AnyHead, **place: Any
    ) -> None:
        """head, place: of `CachedDraft`."""
        self._config = config
        super().__init__(config, weights, kernels, head, **place)

    def _check_head(self, head: TargetHead) -> None:
        super()._check_head(head)
        if self._config.mask_token_id >= len(head.embedding):
            raise ValueError(f"mask token {self._config.mask_token_id} is not in 0..{len(head.embedding) - 1}")

    @property
    def config(self) -> DFlashConfig:
        return self._config

    @property
    def branches(self) -> bool:
        return True

    # --- forwards ---

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:  # noqa: ARG002
        """Rows do not depend on their own tokens otherwise than through the target."""
        loaded = self._loaded()
        self._check_step(step)
        buffers = self._context(step.bucket, len(self.aux_layers))
        with inference(), current(self._device):
            given = [aux_hidden_states[layer] for layer in self.aux_layers]
            here = [one if one.device == self._device else one.to(self._device) for one in given]
            torch.cat(here, 1, out=buffers.given)
            buffers.batch.load(step, None)
            self._kernels.prepare_step(buffers.batch)
            self._kernels.launch("extend", buffers.batch, lambda: self._run_context(loaded, buffers))

    def take(self, step: Step, tokens: Tensor, features: Tensor) -> None:  # noqa: ARG002 - as in `extend`
        loaded = self._loaded()
        self._check_step(step)
        buffers = self._context(step.bucket, 1)
        with inference(), current(self._device):
            buffers.given[: step.rows].copy_(features)
            buffers.batch.load(step, None)
            self._kernels.prepare_step(buffers.batch)
            self._kernels.launch("take", buffers.batch, lambda: self._store(loaded, buffers, buffers.given))

    def propose(self, requests: Sequence[BlockRequest], pick: Pick) -> None:
        """All at once: `pick` is asked once."""
        pick(self._parts(requests))

    def logits(self, requests: Sequence[BlockRequest]) -> Tensor:
        """Float32 logits `[sum of counts, V]`: for each request in turn its rows 1 to count.

        Row j is the draft's word on the token at `position + j`. Read them before the next call: they may be static
        buffers. The block is run at the smallest of 4, 8, 16 ... B rows that holds the proposals.
        """
        parts = self._parts(requests)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, requests: Sequence[BlockRequest]) -> list[Tensor]:
        """The logits of each."""
        loaded = self._loaded()
        block = self.block
        self._check_requests(requests)
        together = list(turns(requests, block, max(block, min(MOST_ROWS, self._buckets[-1]))))
        parts = list[Tensor]()
        for turn in together:
            segments = tuple([Segment(one.slot, one.position, block_rows(one, block)) for one in turn])
            logits = self._run_turn(loaded, turn, segments)
            row = 1
            for request, segment in zip(turn, segments, strict=True):
                rows = logits[row : row + request.count]
                parts.append(rows if len(together) == 1 else rows.clone())
                row += segment.count
        return parts

    def _run_turn(self, loaded: LoadedDraft, requests: Sequence[BlockRequest], segments: tuple[Segment, ...]) -> Tensor:
        total = 0
        tokens = list[int]()
        for request, segment in zip(requests, segments, strict=True):
            tokens += [request.token, *[self._config.mask_token_id] * (segment.count - 1)]
            total += segment.count
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= total))
        buffers = self._block(step.bucket)
        with inference(), current(self._device):
            buffers.batch.before = tuple(request.first for request in requests)
            buffers.batch.load(step, tokens)
            self._kernels.prepare_step(buffers.batch)
            self._kernels.launch("propose", buffers.batch, lambda: self._run_block(loaded, buffers))
        return buffers.logits

    def _run_context(self, loaded: LoadedDraft, buffers: ContextBuffers) -> None:
        kernels = self._kernels
        eps = self._config.rms_norm_eps
        if buffers.fused_layers is not None:
            buffers.fused_layers.run(buffers.given, buffers.batch)
            return
        context = kernels.add_norm(kernels.linear(buffers.given, loaded.fc), None, loaded.hidden_norm, eps)
        self._store(loaded, buffers, context)

    def _store(self, loaded: LoadedDraft, buffers: ContextBuffers, context: Tensor) -> None:
        kernels = self._kernels
        batch = buffers.batch
        for layer, (k_cache, v_cache) in zip(loaded.layers, self._cache.layers, strict=True):
            kv = kernels.linear(context, layer.kv)
            kernels.store(kv, layer.decoder.prep, self._rope, batch, k_cache, v_cache)

    def _run_block(self, loaded: LoadedDraft, buffers: BlockBuffers) -> None:
        kernels = self._kernels
        batch = buffers.batch
        residual = buffers.hidden
        eps = self._config.rms_norm_eps
        if buffers.fused_layers is not None:
            buffers.fused_layers.run(residual, batch, stops=False)
            kernels.write_logits(residual, loaded.norm, eps, self._head.packed, buffers.logits)
            return
        kernels.embed(self._head.embedding, batch.tokens, out=residual)
        if loaded.mask is not None:
            masked = (batch.tokens == self._config.mask_token_id).unsqueeze(1)
            residual.copy_(torch.where(masked, loaded.mask, residual))
        delta: Tensor | None = None
        for layer, (k_cache, v_cache), mask in zip(loaded.layers, self._cache.layers, self._config.masks, strict=True):
            qkv = projected(kernels, layer.decoder.frame, residual, delta)
            q = kernels.rotate_store(qkv, layer.decoder.prep, self._rope, batch, k_cache, v_cache)
            attended = kernels.attend_block(q, k_cache, v_cache, batch, mask)
            delta = finished(kernels, layer.decoder.frame, residual, attended, batch)
        x = kernels.add_norm(residual, delta, loaded.norm, eps)
        buffers.logits.copy_(kernels.linear(x, self._head.packed))

    def build_draft_pass(self, count: int, target: DecodePass) -> DraftPass | None:
        """For decode steps of one slot with so many proposals and what the target's pass leaves, in one call, where the
        library carries out all of it. The same one until the weights go.
        """
        rows = block_rows(BlockRequest(0, 0, 0, 0, count), self.block)
        if (rows, target) not in self._draft_passes:
            fits = rows in self._buckets and target.rows in self._buckets
            self._draft_passes[rows, target] = self._make_draft_pass(rows, target) if fits else None
        return self._draft_passes[rows, target]

    def _make_draft_pass(self, rows: int, target: DecodePass) -> DraftPass | None:
        loaded = self._loaded()
        contexts = list[ContextPass]()
        for bucket in self._buckets[: self._buckets.index(target.rows) + 1]:
            context = self._context(bucket, len(self.aux_layers))
            if context.fused_layers is None:
                return None
            contexts.append(ContextPass(context.fused_layers, context.batch, context.given))
        own = self._block(rows)
        if own.fused_layers is None:
            return None
        ending = (loaded.norm, self._config.rms_norm_eps, self._head.packed)
        block = self._kernels.build_pass(own.fused_layers, ending, own.batch, Forward(own.hidden, {}), own.logits)
        if block is None:
            return None
        left = [target.forward.aux_hidden_states[layer] for layer in self.aux_layers]
        return self._kernels.build_draft_pass(block, contexts, left, self._config.mask_token_id)

    def rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Blocks of every size for one slot, and whole ones for as many as a step holds."""
        blocks = {min(SMALLEST_BLOCK << doubled, self.block) for doubled in range(self.block.bit_length())}
        yield from ([BlockRequest(0, 0, 1, 0, size - 1)] for size in sorted(blocks))
        for count in range(2, min(slots, rows // self.block) + 1):
            yield [BlockRequest(slot, 0, 1, 0, self.block - 1) for slot in range(count)]

    # --- weights and buffers ---

    def _load(self, read: WeightReader, weights: DraftWeights) -> LoadedDraft:
        return load_draft(read, weights, self._kernels, self._config)

    def _make_buffers(self) -> None:
        self._contexts: dict[tuple[int, int], ContextBuffers] = {}
        self._blocks: dict[int, BlockBuffers] = {}
        self._draft_passes: dict[tuple[int, DecodePass], DraftPass | None] = {}

    def _forget_buffers(self) -> None:
        self._contexts.clear()
        self._blocks.clear()
        self._draft_passes.clear()

    def _buffers_bytes(self) -> int:
        held = 0
        for context in tuple(self._contexts.values()):  # asked from other threads, too
            held += context.batch.table.nbytes + context.given.nbytes
        for block in tuple(self._blocks.values()):
            held += block.batch.table.nbytes + block.hidden.nbytes + block.logits.nbytes
        return held

    def _context(self, bucket: int, states: int) -> ContextBuffers:
        """states: that a row is given, of D values each."""
        if (bucket, states) not in self._contexts:
            width = states * self._config.hidden_size
            given = torch.zeros(bucket, width, dtype=self._dtype, device=self._device)
            fused = self._fuse_context(bucket) if states == len(self.aux_layers) else None
            self._contexts[bucket, states] = ContextBuffers(Batch(bucket, self._device), given, fused)
        return self._contexts[bucket, states]

    def _block(self, bucket: int) -> BlockBuffers:
        if bucket not in self._blocks:
            hidden = torch.zeros(bucket, self._config.hidden_size, dtype=self._dtype, device=self._device)
            logits = torch.zeros(bucket, len(self._head.embedding), device=self._device)
            fused = self._fuse_layers(bucket)
            self._blocks[bucket] = BlockBuffers(BlockBatch(bucket, self._device), hidden, logits, fused)
        return self._blocks[bucket]

    def _fuse_context(self, bucket: int) -> FusedContext | None:
        loaded = self._loaded()
        layers = [
            ContextLayer(layer.kv, layer.decoder.prep, *caches)
            for layer, caches in zip(loaded.layers, self._cache.layers, strict=True)
        ]
        eps = self._config.rms_norm_eps
        return self._kernels.fuse_context(loaded.fc, loaded.hidden_norm, eps, layers, self._rope, bucket)

    def _fuse_layers(self, bucket: int) -> FusedLayers | None:
        loaded = self._loaded()
        layers = list[WholeLayer]()
        for layer, caches, mask in zip(loaded.layers, self._cache.layers, self._config.masks, strict=True):
            feed = layer.decoder.frame.feed
            assert not isinstance(feed, Experts), "drafts are dense"
            layers.append(whole_layer(layer.decoder, feed, caches, mask=mask))
        embedding = Embedding(self._head.embedding, loaded.mask, self._config.mask_token_id)
        return self._kernels.fuse_layers(layers, self._rope, bucket, embedding)
