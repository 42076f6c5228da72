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

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from attrs import define
from torch import Tensor

from adapters.layout import RowSpec
from adapters.models.decoder import WeightReader, finished, projected
from adapters.models.dflash.blocks import MOST_ROWS, BlockRequest, check_requests, turns
from adapters.models.dflash.config import DFlashConfig
from adapters.models.dflash.weights import DraftWeights, LoadedDraft, cache_rows, load_draft
from adapters.models.kernels.batch import Batch, BlockBatch
from adapters.models.kernels.interface import Kernels
from adapters.models.kv_cache import KvCache
from adapters.models.parking import ParkedWeights, State
from adapters.models.shard import NamedTensors, Segment, Step, TargetHead


class NotLoaded(RuntimeError):
    """A forward was asked of a draft whose weights are parked or released."""


@define(eq=False)
class ContextBuffers:
    """The static tensors of one bucket of `extend`. fused: `[bucket, K D]`."""

    batch: Batch
    fused: Tensor


@define(eq=False)
class BlockBuffers:
    """The static tensors of one bucket of `propose`. hidden: `[bucket, D]`; logits: float32 `[bucket, V]`."""

    batch: BlockBatch
    hidden: Tensor
    logits: Tensor


class DFlashDraft:
    """Called on the lane's thread only.

    kernels: an instance of its own, of the target's kind. head: what it shares with the target, on the same device
    and in the same dtype. buckets: the row counts that `extend` accepts and `propose` pads to. A slot holds `capacity`
    rows and room for the block behind them.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: DraftWeights,
        kernels: Kernels,
        head: TargetHead,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        slots: int = 4,
        capacity: int = 8192,
        buckets: Sequence[int] = (4, 8, 16, 32, 64, 128, 256),
    ) -> None:
        self._config, self._kernels, self._head = config, kernels, head
        self._device, self._dtype = torch.device(device), dtype
        self._buckets = tuple(sorted(buckets))
        _check_arguments(config, head, dtype, (slots, capacity), self._buckets)
        rows = cache_rows(capacity, config.block, kernels.kv_tile)
        self._rope = config.rotary.tables(rows, self._device)
        names = [f"draft.layers.{layer}" for layer in range(config.num_layers)]
        shape = (slots, config.num_kv_heads, rows, config.head_dim)
        self._cache = KvCache(names, shape, dtype=dtype, device=self._device, capacity=capacity)
        self._contexts: dict[int, ContextBuffers] = {}
        self._blocks: dict[int, BlockBuffers] = {}
        self._parking = ParkedWeights(partial(self._load, weights), self._device)
        self._parking.unpark()
        self._try()
        facts = (weights.digest(), config.row_facts(), str(dtype))
        self.identity = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def _try(self) -> None:
        """A first forward of each kind, over nothing: what the kernels cannot do they say now, as a ValueError."""
        shape, bucket = (self._buckets[0], self._config.hidden_size), self._buckets[0]
        nothing = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.extend(Step((Segment(0, 0, 1),), bucket), dict.fromkeys(self.aux_layers, nothing))
        self.propose([BlockRequest(0, 0, 1, 0, 1)])

    # --- what it is ---

    @property
    def config(self) -> DFlashConfig:
        return self._config

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers that `extend` needs the outputs of."""
        return self._config.aux_layers

    @property
    def block(self) -> int:
        """B; at most B - 1 proposals."""
        return self._config.block

    @property
    def capacity(self) -> int:
        """Context rows of a slot."""
        return self._cache.capacity

    @property
    def row_spec(self) -> RowSpec:
        return self._cache.spec

    @property
    def addressed(self) -> bool:
        return True

    @property
    def state(self) -> State:
        return self._parking.state

    # --- forwards ---

    def extend(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> None:
        """Write the context rows of the step's rows, at their slots and positions.

        aux_hidden_states: for each auxiliary layer what the target's forward of this very step left, `[bucket, D]`.
        Rows past a position that is gone back to need not be taken back.
        """
        loaded = self._loaded()
        self._check_step(step)
        buffers = self._context(step.bucket)
        with torch.inference_mode():
            torch.cat([aux_hidden_states[layer] for layer in self.aux_layers], 1, out=buffers.fused)
            buffers.batch.load(step, None)
            self._kernels.prepare(buffers.batch)
            self._kernels.launch("extend", buffers.batch, lambda: self._run_context(loaded, buffers))

    def propose(self, requests: Sequence[BlockRequest]) -> Tensor:
        """Float32 logits `[sum of counts, V]`: for each request in turn its rows 1 to count.

        Row j is the draft's word on the token at `position + j`. Read them before the next call: they may be static
        buffers. The block is run at the smallest of 4, 8, 16 ... B rows that holds the proposals.
        """
        loaded, block = self._loaded(), self.block
        limits = {"slots": self._cache.slots, "capacity": self.capacity, "vocab": len(self._head.embedding)}
        check_requests(requests, block=block, **limits)
        together = list(turns(requests, block, max(block, min(MOST_ROWS, self._buckets[-1]))))
        parts = []
        for turn in together:
            logits = self._run_turn(loaded, turn)
            row = 0
            for request in turn:
                rows = logits[row + 1 : row + 1 + request.count]
                parts.append(rows if len(together) == 1 else rows.clone())
                row += request.rows(block)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run_turn(self, loaded: LoadedDraft, requests: Sequence[BlockRequest]) -> Tensor:
        segments = tuple(request.segment(self.block) for request in requests)
        total = sum(segment.count for segment in segments)
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= total))
        buffers = self._block(step.bucket)
        tokens = torch.full((total,), self._config.mask_token_id)
        row = 0
        for request, segment in zip(requests, segments, strict=True):
            tokens[row] = request.token
            row += segment.count
        with torch.inference_mode():
            buffers.batch.before = tuple(request.first for request in requests)
            buffers.batch.load(step, tokens)
            self._kernels.prepare(buffers.batch)
            self._kernels.launch("propose", buffers.batch, lambda: self._run_block(loaded, buffers))
        return buffers.logits

    def _run_context(self, loaded: LoadedDraft, buffers: ContextBuffers) -> None:
        kernels, batch, eps = self._kernels, buffers.batch, self._config.rms_norm_eps
        context = kernels.add_norm(kernels.linear(buffers.fused, loaded.fc), None, loaded.hidden_norm, eps)
        for layer, (k_cache, v_cache) in zip(loaded.layers, self._cache.layers, strict=True):
            kv = kernels.linear(context, layer.kv)
            kernels.store(kv, layer.decoder.prep, self._rope, batch, k_cache, v_cache)

    def _run_block(self, loaded: LoadedDraft, buffers: BlockBuffers) -> None:
        kernels, batch, residual = self._kernels, buffers.batch, buffers.hidden
        torch.index_select(self._head.embedding, 0, batch.tokens, out=residual)
        if loaded.mask is not None:
            masked = (batch.tokens == self._config.mask_token_id).unsqueeze(1)
            residual.copy_(torch.where(masked, loaded.mask, residual))
        delta: Tensor | None = None
        for layer, (k_cache, v_cache), mask in zip(loaded.layers, self._cache.layers, self._config.masks, strict=True):
            qkv = projected(kernels, layer.decoder.frame, residual, delta)
            q = kernels.rotate_store(qkv, layer.decoder.prep, self._rope, batch, k_cache, v_cache)
            attended = kernels.attend_block(q, k_cache, v_cache, batch, mask)
            delta = finished(kernels, layer.decoder.frame, residual, attended)
        x = kernels.add_norm(residual, delta, loaded.norm, self._config.rms_norm_eps)
        buffers.logits.copy_(kernels.linear(x, self._head.packed))

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy context rows `[start, stop)` of slot `source` into slot `target`."""
        self._cache.copy(source, target, start, stop)

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Context rows `[start, stop)` where they are: a view `[layers, 2, KV, stop - start, hd]`."""
        return self._cache.rows(slot, start, stop)

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        """Context rows `[start, stop)` as `draft.layers.N.k` and `.v`, each `[KV, stop - start, hd]`, on the host."""
        return self._cache.export(slot, start, stop)

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        """Put what `export_rows` gave back at `start`; a name, shape or dtype that is not ours is a ValueError."""
        self._cache.import_(slot, start, rows)

    # --- residency ---

    def park(self) -> int:
        """Give the weights' memory on the device back; context rows stay. Returns the bytes given back.

        On CUDA they are kept in pinned host memory; on CPU the checkpoint is read again, from the page cache at best.
        """
        if self.state != "loaded":
            return 0
        self._forget()
        return self._parking.park()

    def unpark(self) -> int:
        """Bring the weights back; returns the bytes. Whatever fails leaves the draft as it was.

        Raises torch.OutOfMemoryError where there is no room, CheckpointError if the files have gone or are cut short.
        """
        return self._parking.unpark()

    def release(self) -> None:
        """Give back what parking keeps on the host as well; unparking reads the checkpoint again."""
        self._forget()
        self._parking.release()

    def memory(self) -> Mapping[str, int]:
        """Bytes: `weights`, `kv` and `buffers` on the device; `host` pinned by parking. Nothing shared is counted."""
        buffers = self._rope.cos.nbytes + self._rope.sin.nbytes
        for context in tuple(self._contexts.values()):  # asked from other threads, too
            buffers += context.batch.table.nbytes + context.fused.nbytes
        for block in tuple(self._blocks.values()):
            buffers += block.batch.table.nbytes + block.hidden.nbytes + block.logits.nbytes
        return {
            "weights": self._parking.weights_bytes,
            "host": self._parking.host_bytes,
            "kv": self._cache.nbytes,
            "buffers": buffers,
        }

    def close(self) -> None:
        """Give all memory back; the draft is of no use afterwards."""
        self.release()
        self._cache.close()

    def _forget(self) -> None:
        """Buffers go, and recorded graphs with the weights' addresses in them: fresh kernels have recorded nothing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kernels = self._kernels.fresh()
        self._contexts.clear()
        self._blocks.clear()

    # --- weights and buffers ---

    def _loaded(self) -> LoadedDraft:
        loaded = self._parking.loaded
        if loaded is None:
            raise NotLoaded(f"the draft is {self.state}")
        return loaded

    def _load(self, weights: DraftWeights) -> LoadedDraft:
        return load_draft(WeightReader(weights, self._device, self._dtype), weights, self._kernels, self._config)

    def _context(self, bucket: int) -> ContextBuffers:
        if bucket not in self._contexts:
            width = len(self.aux_layers) * self._config.hidden_size
            fused = torch.zeros(bucket, width, dtype=self._dtype, device=self._device)
            self._contexts[bucket] = ContextBuffers(Batch(bucket, self._device), fused)
        return self._contexts[bucket]

    def _block(self, bucket: int) -> BlockBuffers:
        if bucket not in self._blocks:
            hidden = torch.zeros(bucket, self._config.hidden_size, dtype=self._dtype, device=self._device)
            logits = torch.zeros(bucket, len(self._head.embedding), device=self._device)
            self._blocks[bucket] = BlockBuffers(BlockBatch(bucket, self._device), hidden, logits)
        return self._blocks[bucket]

    # --- arguments ---

    def _check_step(self, step: Step) -> None:
        if step.bucket not in self._buckets or not 0 < step.rows <= step.bucket:
            raise ValueError(f"{step.rows} rows at bucket {step.bucket}; accepted: buckets {self._buckets}, not empty")
        if len({segment.slot for segment in step.segments}) != len(step.segments):
            raise ValueError("a slot appears twice in one step")
        for segment in step.segments:
            self._cache.check_span(segment.slot, segment.start, segment.start + segment.count)


def _check_arguments(
    config: DFlashConfig, head: TargetHead, dtype: torch.dtype, caches: tuple[int, int], buckets: Sequence[int]
) -> None:
    if min(caches) < 1:
        raise ValueError(f"{caches[0]} slots of {caches[1]} rows; accepted: at least 1 of 1")
    if not buckets or buckets[0] < 1 or buckets[-1] < config.block:
        raise ValueError(f"buckets {tuple(buckets)} do not hold a block of {config.block} rows")
    if head.embedding.shape[1] != config.hidden_size or head.embedding.dtype != dtype:
        shape = list(head.embedding.shape)
        raise ValueError(
            f"the target's embedding is {head.embedding.dtype} {shape}, not {dtype} of {config.hidden_size}"
        )
    if config.mask_token_id >= len(head.embedding):
        raise ValueError(f"mask token {config.mask_token_id} is not in 0..{len(head.embedding) - 1}")
