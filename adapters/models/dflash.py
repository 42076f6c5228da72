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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import define, frozen
from torch import Tensor

from adapters.layout import RowSpec, dtype_name
from adapters.models.checkpoint import Weights
from adapters.models.dflash_checkpoint import MASK_EMBEDDING
from adapters.models.dflash_config import DFlashConfig
from adapters.models.kernels import Batch, BlockBatch, Kernels
from adapters.models.kernels.products import TILE, Heads, Products, Weight
from adapters.models.parking import Parking, State
from adapters.models.shard import NamedTensors, Segment, Step, TargetHead

# Rows of one draft forward: more blocks than fit are proposed to in turns, which bounds what attention needs.
MOST_ROWS = 128
SMALLEST_BLOCK = 4


class NotLoaded(RuntimeError):
    """A forward was asked of a draft whose weights are parked or released."""


class DraftWeights(Weights, Protocol):
    """Where the draft gets its tensors from, by their published names."""

    def has(self, name: str) -> bool: ...

    def digest(self) -> str:
        """Identifies the weights."""
        ...


@frozen
class Ask:
    """A slot that wants `count` proposals after `token`.

    Context rows `[first, position)` are valid; token is the slot's last one, which the target has not been fed yet:
    it will be at `position`. The proposals are for `position + 1` and on.
    """

    slot: int
    first: int
    position: int
    token: int
    count: int


@frozen
class Layer:
    """One draft layer's weights, fused and packed; kv is the part of qkv that context rows go through."""

    input_norm: Tensor
    qkv: Any
    kv: Any
    q_norm: Tensor
    k_norm: Tensor
    out: Any
    post_norm: Tensor
    gate_up: Any
    down: Any


@frozen
class Loaded:
    """All weights. mask: `[D]`, in the place of the target's embedding of the mask token."""

    fc: Any
    hidden_norm: Tensor
    norm: Tensor
    mask: Tensor | None
    layers: tuple[Layer, ...]


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


def products(config: DFlashConfig, target: Products, *, capacity: int, vocab: int) -> Products:
    """What the CPU kernels multiply for a draft, in the steps of its target. capacity: context rows of a slot."""
    hidden, size = config.hidden_size, config.head_dim
    projected, shared = config.num_heads * size, 2 * config.num_kv_heads * size
    weights = (
        Weight(hidden, len(config.aux_layers) * hidden),
        Weight(projected + shared, hidden),
        Weight(shared, hidden),
        Weight(hidden, projected),
        Weight(config.intermediate_size, hidden, gated=True),
        Weight(hidden, config.intermediate_size),
    )
    head = Weight(vocab, hidden)
    heads = Heads(config.num_heads // config.num_kv_heads, size, cache_rows(capacity, config.block, TILE))
    own = tuple(dict.fromkeys(one for one in weights if one != head))
    return Products(own, (heads,), target.rows, target.threads, target.wider)


def cache_rows(capacity: int, block: int, tile: int) -> int:
    """A slot's rows, and room for the block behind them, in whole tiles."""
    return -(-(capacity + block) // tile) * tile


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
        self._config, self._weights, self._kernels, self._head = config, weights, kernels, head
        self._device, self._dtype = torch.device(device), dtype
        self._slots, self._buckets = slots, tuple(sorted(buckets))
        _check_arguments(config, head, dtype, (slots, capacity), self._buckets)
        self._capacity = capacity
        rows = cache_rows(capacity, config.block, kernels.kv_tile)
        self._rope = config.rotary.tables(rows, self._device)
        shape = (config.num_layers, 2, slots, config.num_kv_heads, rows, config.head_dim)
        self._context_rows = torch.zeros(shape, dtype=dtype, device=self._device)
        self._caches = [(k_cache, v_cache) for k_cache, v_cache in self._context_rows]
        self._contexts: dict[int, ContextBuffers] = {}
        self._blocks: dict[int, BlockBuffers] = {}
        self._parking = Parking(self._load, self._device)
        self._parking.unpark()
        self._try()
        facts = (weights.digest(), config.row_facts(), str(dtype))
        self.identity = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def _try(self) -> None:
        """A first forward of each kind, over nothing: what the kernels cannot do they say now, as a ValueError."""
        shape, bucket = (self._buckets[0], self._config.hidden_size), self._buckets[0]
        nothing = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.extend(Step((Segment(0, 0, 1),), bucket), dict.fromkeys(self.aux_layers, nothing))
        self.propose([Ask(0, 0, 1, 0, 1)])

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
        return self._capacity

    @property
    def row_spec(self) -> RowSpec:
        config = self._config
        names = tuple(f"draft.layers.{layer}.{part}" for layer in range(config.num_layers) for part in "kv")
        return RowSpec(names, config.num_kv_heads, config.head_dim, dtype_name(self._dtype))

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

    def propose(self, asks: Sequence[Ask]) -> Tensor:
        """Float32 logits `[sum of counts, V]`: for each ask in turn its rows 1 to count.

        Row j is the draft's word on the token at `position + j`. Read them before the next call: they may be static
        buffers. The block is run at the smallest of 4, 8, 16 ... B rows that holds the proposals.
        """
        loaded = self._loaded()
        self._check_asks(asks)
        turns = list(self._turns(asks))
        parts = []
        for turn in turns:
            logits = self._run_turn(loaded, turn)
            row = 0
            for ask in turn:
                rows = logits[row + 1 : row + 1 + ask.count]
                parts.append(rows if len(turns) == 1 else rows.clone())
                row += self._rows(ask)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run_turn(self, loaded: Loaded, asks: Sequence[Ask]) -> Tensor:
        segments = tuple(Segment(ask.slot, ask.position, self._rows(ask)) for ask in asks)
        total = sum(segment.count for segment in segments)
        step = Step(segments, next(bucket for bucket in self._buckets if bucket >= total))
        buffers = self._block(step.bucket)
        tokens = torch.full((total,), self._config.mask_token_id)
        row = 0
        for ask, segment in zip(asks, segments, strict=True):
            tokens[row] = ask.token
            row += segment.count
        with torch.inference_mode():
            buffers.batch.before = tuple(ask.first for ask in asks)
            buffers.batch.load(step, tokens)
            self._kernels.prepare(buffers.batch)
            self._kernels.launch("propose", buffers.batch, lambda: self._run_block(loaded, buffers))
        return buffers.logits

    def _run_context(self, loaded: Loaded, buffers: ContextBuffers) -> None:
        kernels, batch, eps = self._kernels, buffers.batch, self._config.rms_norm_eps
        context = kernels.add_norm(kernels.linear(buffers.fused, loaded.fc), None, loaded.hidden_norm, eps)
        for layer, (k_cache, v_cache) in zip(loaded.layers, self._caches, strict=True):
            kv = kernels.linear(context, layer.kv)
            kernels.store(kv, layer.k_norm, eps, self._rope, batch, k_cache, v_cache)

    def _run_block(self, loaded: Loaded, buffers: BlockBuffers) -> None:
        kernels, batch, rope, eps = self._kernels, buffers.batch, self._rope, self._config.rms_norm_eps
        residual = buffers.hidden
        torch.index_select(self._head.embedding, 0, batch.tokens, out=residual)
        if loaded.mask is not None:
            masked = (batch.tokens == self._config.mask_token_id).unsqueeze(1)
            residual.copy_(torch.where(masked, loaded.mask, residual))
        delta: Tensor | None = None
        for layer, (k_cache, v_cache), mask in zip(loaded.layers, self._caches, self._config.masks, strict=True):
            x = kernels.add_norm(residual, delta, layer.input_norm, eps)
            qkv = kernels.linear(x, layer.qkv)
            q = kernels.rotate_store(qkv, layer.q_norm, layer.k_norm, eps, rope, batch, k_cache, v_cache)
            delta = kernels.linear(kernels.attend_block(q, k_cache, v_cache, batch, mask), layer.out)
            x = kernels.add_norm(residual, delta, layer.post_norm, eps)
            delta = kernels.linear(kernels.gated(x, layer.gate_up), layer.down)
        x = kernels.add_norm(residual, delta, loaded.norm, eps)
        buffers.logits.copy_(kernels.linear(x, self._head.packed))

    def _rows(self, ask: Ask) -> int:
        """The block's size for so many proposals: the draft was trained on blocks of B and bears smaller ones."""
        rows = SMALLEST_BLOCK
        while rows < ask.count + 1:
            rows *= 2
        return min(rows, self.block)

    def _turns(self, asks: Sequence[Ask]) -> Iterator[list[Ask]]:
        most = max(self.block, min(MOST_ROWS, self._buckets[-1]))
        turn: list[Ask] = []
        rows = 0
        for ask in asks:
            if rows + self._rows(ask) > most:
                yield turn
                turn, rows = [], 0
            turn.append(ask)
            rows += self._rows(ask)
        yield turn

    # --- rows ---

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy context rows `[start, stop)` of slot `source` into slot `target`."""
        self._check_span(source, start, stop)
        self._check_span(target, start, stop)
        self._context_rows[:, :, target, :, start:stop] = self._context_rows[:, :, source, :, start:stop]

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Context rows `[start, stop)` where they are: a view `[layers, 2, KV, stop - start, hd]`."""
        self._check_span(slot, start, stop)
        return self._context_rows[:, :, slot, :, start:stop]

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        """Context rows `[start, stop)` as `draft.layers.N.k` and `.v`, each `[KV, stop - start, hd]`, on the host."""
        self._check_span(slot, start, stop)
        rows: dict[str, Tensor] = {}
        for index, caches in enumerate(self._caches):
            for part, cache in zip("kv", caches, strict=True):
                host = torch.empty(cache.shape[1], stop - start, cache.shape[3], dtype=cache.dtype)
                rows[f"draft.layers.{index}.{part}"] = host.copy_(cache[slot, :, start:stop])
        return rows

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        """Put what `export_rows` gave back at `start`; a name, shape or dtype that is not ours is a ValueError."""
        ours = {
            f"draft.layers.{index}.{part}": cache
            for index, caches in enumerate(self._caches)
            for part, cache in zip("kv", caches, strict=True)
        }
        if set(rows) != set(ours):
            odd = sorted(set(ours).symmetric_difference(rows))
            raise ValueError(f"rows of a draft of {self._config.num_layers} layers: {odd[0]} is odd")
        first = next(iter(rows.values()))
        count = first.shape[1] if first.dim() == 3 else 0
        self._check_span(slot, start, start + count)
        shape = (self._config.num_kv_heads, count, self._config.head_dim)
        for name, tensor in rows.items():
            if tensor.shape != shape or tensor.dtype != self._dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {self._dtype} {list(shape)}")
        for name, cache in ours.items():
            cache[slot, :, start : start + count] = rows[name]

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
            "kv": self._context_rows.nbytes,
            "buffers": buffers,
        }

    def close(self) -> None:
        """Give all memory back; the draft is of no use afterwards."""
        self.release()
        self._caches.clear()
        self._context_rows = self._context_rows.new_empty(0)

    def _forget(self) -> None:
        """Buffers go, and recorded graphs with the weights' addresses in them: fresh kernels have recorded nothing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kernels = self._kernels.fresh()
        self._contexts.clear()
        self._blocks.clear()

    # --- weights and buffers ---

    def _loaded(self) -> Loaded:
        loaded = self._parking.loaded
        if loaded is None:
            raise NotLoaded(f"the draft is {self.state}")
        return loaded

    def _load(self) -> Loaded:
        mask = self._read(MASK_EMBEDDING).flatten() if self._weights.has(MASK_EMBEDDING) else None
        return Loaded(
            fc=self._kernels.pack(self._read("fc.weight")),
            hidden_norm=self._read("hidden_norm.weight"),
            norm=self._read("norm.weight"),
            mask=mask,
            layers=tuple(self._load_layer(f"layers.{index}.") for index in range(self._config.num_layers)),
        )

    def _load_layer(self, prefix: str) -> Layer:
        kernels, attention, mlp = self._kernels, prefix + "self_attn.", prefix + "mlp."
        qkv = self._read(*(f"{attention}{part}_proj.weight" for part in "qkv"))
        return Layer(
            input_norm=self._read(prefix + "input_layernorm.weight"),
            qkv=kernels.pack(qkv),
            kv=kernels.pack(qkv[self._config.num_heads * self._config.head_dim :]),
            q_norm=self._read(attention + "q_norm.weight"),
            k_norm=self._read(attention + "k_norm.weight"),
            out=kernels.pack(self._read(attention + "o_proj.weight")),
            post_norm=self._read(prefix + "post_attention_layernorm.weight"),
            gate_up=kernels.pack_gated(self._read(mlp + "gate_proj.weight", mlp + "up_proj.weight")),
            down=kernels.pack(self._read(mlp + "down_proj.weight")),
        )

    def _read(self, *names: str) -> Tensor:
        """The named tensors, stacked along their rows, on the device in the draft's dtype."""
        parts = [self._weights.read(name).to(self._device, self._dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

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
            self._check_span(segment.slot, segment.start, segment.start + segment.count)

    def _check_asks(self, asks: Sequence[Ask]) -> None:
        vocab = len(self._head.embedding)
        if not asks or len({ask.slot for ask in asks}) != len(asks):
            raise ValueError("nothing is asked, or a slot asks twice")
        for ask in asks:
            if not 0 <= ask.slot < self._slots:
                raise ValueError(f"slot {ask.slot} is not in 0..{self._slots - 1}")
            if not 0 <= ask.first <= ask.position <= self._capacity:
                raise ValueError(f"context rows {ask.first}..{ask.position} are not within {self._capacity} rows")
            if not 1 <= ask.count < self.block:
                raise ValueError(f"{ask.count} proposals; accepted: 1..{self.block - 1}")
            if not 0 <= ask.token < vocab:
                raise ValueError(f"token {ask.token} is not in 0..{vocab - 1}")

    def _check_span(self, slot: int, start: int, stop: int) -> None:
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot {slot} is not in 0..{self._slots - 1}")
        if not 0 <= start < stop <= self._capacity:
            raise ValueError(f"rows {start}..{stop} are not a span within a slot's {self._capacity} rows")


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
