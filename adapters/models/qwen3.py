"""Qwen3 (dense): a range of its layers with slots and KV caches, as fixed-shape forwards over the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from adapters.layout import RowSpec, TensorSpec, dtype_name
from adapters.models.checkpoint import Weights
from adapters.models.config import Qwen3Config
from adapters.models.kernels import Batch, Kernels, Rope
from adapters.models.kernels.products import SMALL, TILE, Heads, Products, Weight
from adapters.models.parking import size_of
from adapters.models.shard import Forward, Kept, NamedTensors, Step, TargetHead
from adapters.models.tree_attention import TreeAttention, check_tree

BUCKETS = (4, 8, 16, 32, 64, 128, 256)
HEAD_ROWS = 64  # logits are asked for of decoded and verified rows, a batch of them at most; of more in turns


@frozen
class Layer:
    """One decoder layer's weights, fused and packed, and its caches `[slots, KV, capacity, hd]`, views of all rows."""

    input_norm: Tensor
    qkv: Any
    q_norm: Tensor
    k_norm: Tensor
    out: Any
    post_norm: Tensor
    gate_up: Any
    down: Any
    k_cache: Tensor
    v_cache: Tensor

    @property
    def weights(self) -> tuple[Any, ...]:
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        return (*norms, self.qkv, self.out, self.gate_up, self.down)


@define(eq=False)
class Buffers:
    """The static tensors of one bucket."""

    batch: Batch
    hidden: Tensor
    logits: Tensor | None
    forward: Forward
    tree: TreeAttention | None = None


def rope_tables(config: Qwen3Config, capacity: int, device: torch.device) -> Rope:
    """Computed on the host in float32, exactly as transformers does, so that every device rotates alike."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(capacity).float(), frequencies)
    return Rope(angles.cos().to(device), angles.sin().to(device))


def products(
    config: Qwen3Config, rows: Sequence[int], *, capacity: int, dtype: torch.dtype, threads: int, memory: int = 1 << 62
) -> Products:
    """What the CPU kernels multiply for this model. capacity: rows of a slot; memory: bytes that weights may take."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    projected, shared = config.num_heads * size, 2 * config.num_kv_heads * size
    layer = (
        Weight(projected + shared, hidden),
        Weight(hidden, projected),
        Weight(inner, hidden, gated=True),
        Weight(hidden, inner),
    )
    head = Weight(config.vocab_size, hidden, most=HEAD_ROWS)
    each = sum(one.outputs * one.inputs * (2 if one.gated else 1) for one in layer)
    count = each * config.num_layers + head.outputs * head.inputs
    return Products(
        weights=tuple(dict.fromkeys((*layer, head))),
        heads=(Heads(config.group, size, -(-capacity // TILE) * TILE),),
        rows=tuple(rows),
        threads=(1 if count * dtype.itemsize <= SMALL else threads, threads),
        wider=count * 4 <= memory,
    )


class Qwen3Shard:
    """Layers `[first, last)` on one device; the embedding with layer 0, final norm and head with the last layer.

    aux_layers: global layer indices whose output (HF `hidden_states[i + 1]`) every forward leaves in its
    `aux_hidden_states`. buckets: the row counts that `forward` accepts. capacity is rounded up to whole key tiles of
    the kernels.
    """

    def __init__(
        self,
        config: Qwen3Config,
        weights: Weights,
        kernels: Kernels,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: range | None = None,
        slots: int = 4,
        capacity: int = 8192,
        buckets: Sequence[int] = BUCKETS,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self._config, self._kernels = config, kernels
        self._device, self._dtype = torch.device(device), dtype
        self._layers = range(config.num_layers) if layers is None else layers
        _check_arguments(config, self._layers, slots, capacity, (buckets, aux_layers))
        self._slots = slots
        self._capacity = -(-capacity // kernels.kv_tile) * kernels.kv_tile
        self._buckets, self._aux_layers = tuple(buckets), tuple(aux_layers)
        self._buffers: dict[int, Buffers] = {}
        self._rope = rope_tables(config, self._capacity, self._device)
        shape = (len(self._layers), 2, slots, config.num_kv_heads, self._capacity, config.head_dim)
        self._rows = torch.zeros(shape, dtype=dtype, device=self._device)
        self._load(weights)

    def _load(self, weights: Weights) -> None:
        config = self._config
        last = self._layers.stop == config.num_layers
        self._embedding: Tensor | None = None
        self._norm: Tensor | None = None
        self._head: Any = None
        table: Tensor | None = None
        if self._layers.start == 0 or (last and config.tie_word_embeddings):
            table = self._read(weights, "model.embed_tokens.weight")
        if self._layers.start == 0:
            self._embedding = table
        self._blocks = [self._load_layer(weights, layer) for layer in self._layers]
        if last:
            self._norm = self._read(weights, "model.norm.weight")
            head = table if config.tie_word_embeddings else self._read(weights, "lm_head.weight")
            assert head is not None
            self._head = self._kernels.pack(head)
        layers = tuple(block.weights for block in self._blocks)
        self._weights_bytes = size_of((self._embedding, self._norm, self._head, layers))

    def _read(self, weights: Weights, *names: str) -> Tensor:
        """The named tensors, stacked along their rows, on the device in the model's dtype."""
        parts = [weights.read(name).to(self._device, self._dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def _load_layer(self, weights: Weights, index: int) -> Layer:
        kernels, prefix = self._kernels, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        k_cache, v_cache = self._rows[index - self._layers.start]
        projections = [f"{attention}{part}_proj.weight" for part in "qkv"]
        return Layer(
            input_norm=self._read(weights, prefix + "input_layernorm.weight"),
            qkv=kernels.pack(self._read(weights, *projections)),
            q_norm=self._read(weights, attention + "q_norm.weight"),
            k_norm=self._read(weights, attention + "k_norm.weight"),
            out=kernels.pack(self._read(weights, attention + "o_proj.weight")),
            post_norm=self._read(weights, prefix + "post_attention_layernorm.weight"),
            gate_up=kernels.pack_gated(self._read(weights, mlp + "gate_proj.weight", mlp + "up_proj.weight")),
            down=kernels.pack(self._read(weights, mlp + "down_proj.weight")),
            k_cache=k_cache,
            v_cache=v_cache,
        )

    @property
    def config(self) -> Qwen3Config:
        return self._config

    @property
    def layers(self) -> range:
        return self._layers

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def capacity(self) -> int:
        """Rows a slot can hold; at least what was asked for."""
        return self._capacity

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def kernels(self) -> Kernels:
        """A draft beside it runs on fresh ones of their kind."""
        return self._kernels

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def row_spec(self) -> RowSpec:
        names = tuple(f"layers.{layer}.{part}" for layer in self._layers for part in "kv")
        return RowSpec(names, self._config.num_kv_heads, self._config.head_dim, dtype_name(self._dtype))

    @property
    def state_specs(self) -> tuple[TensorSpec, ...]:
        return ()

    @property
    def addressed(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def head(self) -> TargetHead:
        """Embedding and head, for a draft; ValueError if the shard does not have both."""
        if self._embedding is None or self._head is None:
            raise ValueError(f"layers {self._layers.start}..{self._layers.stop - 1} lack the embedding or the head")
        return TargetHead(self._embedding, self._head)

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        self._check_step(step, inputs)
        buffers = self._at(step.bucket)
        with torch.inference_mode():
            if self._embedding is None:
                buffers.hidden.copy_(inputs)
            buffers.batch.load(step, None if self._embedding is None else inputs)
            self._kernels.prepare(buffers.batch)
            if step.branches:
                self._run_tree(buffers, step)
                return buffers.forward
            # Only the model's last layer may stop early, and only if nobody wants what it leaves.
            early = step.rows_only and self._norm is not None and self._layers.stop - 1 not in self._aux_layers
            name = "rows" if early else "layers"
            self._kernels.launch(name, buffers.batch, lambda: self._run_layers(buffers, early=early))
        return buffers.forward

    def _run_tree(self, buffers: Buffers, step: Step) -> None:
        """Its shape changes from step to step, so no graph is recorded of it."""
        if buffers.tree is None:
            caches = [(layer.k_cache, layer.v_cache) for layer in self._blocks]
            width = self._config.num_heads * self._config.head_dim
            buffers.tree = TreeAttention(self._kernels, step.bucket, self._rope, caches, width)
        buffers.tree.load(step)
        if self._device.type == "cuda":
            self._run_layers(buffers, buffers.tree)
        else:
            self._kernels.launch("tree", buffers.batch, lambda: self._run_layers(buffers, buffers.tree))

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        if len(kept) != len(step.parts):
            raise ValueError(f"{len(kept)} answers for a step of {len(step.parts)} slots")
        tree = self._at(step.bucket).tree
        if step.branches and tree is not None:
            with torch.inference_mode():
                tree.settle(step, kept)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        """Float32 `[bucket, V]`, a static buffer; padded rows hold finite garbage."""
        buffers = self._at(step.bucket)
        if self._norm is None:
            raise ValueError(f"logits: layers {self._layers.start}..{self._layers.stop - 1} have no head")
        if buffers.logits is None:  # a prefill's bucket never needs them, and they are large
            buffers.logits = torch.zeros(step.bucket, self._config.vocab_size, device=self._device)
        with torch.inference_mode():
            if hidden is not buffers.hidden:
                buffers.hidden.copy_(hidden)
            self._kernels.launch("logits", buffers.batch, lambda: self._run_head(buffers))
        return buffers.logits

    def _run_layers(self, buffers: Buffers, tree: TreeAttention | None = None, *, early: bool = False) -> None:
        kernels, batch, rope, eps = self._kernels, buffers.batch, self._rope, self._config.rms_norm_eps
        residual, aux_hidden_states = buffers.hidden, buffers.forward.aux_hidden_states
        if self._embedding is not None:
            torch.index_select(self._embedding, 0, batch.tokens, out=residual)
        delta: Tensor | None = None
        for index, layer in zip(self._layers, self._blocks, strict=True):
            x = kernels.add_norm(residual, delta, layer.input_norm, eps)
            if index - 1 in aux_hidden_states and index != self._layers.start:
                aux_hidden_states[index - 1].copy_(residual)
            qkv = kernels.linear(x, layer.qkv)
            if tree is None:
                k_cache, v_cache = layer.k_cache, layer.v_cache
                q = kernels.rotate_store(qkv, layer.q_norm, layer.k_norm, eps, rope, batch, k_cache, v_cache)
                if early and index == self._layers.stop - 1:
                    return
                attended = kernels.attend(q, k_cache, v_cache, batch)
            else:
                number = index - self._layers.start
                attended = tree.attend(number, qkv, layer.q_norm, layer.k_norm, eps)
            delta = kernels.linear(attended, layer.out)
            x = kernels.add_norm(residual, delta, layer.post_norm, eps)
            delta = kernels.linear(kernels.gated(x, layer.gate_up), layer.down)
        if delta is not None:
            residual.add_(delta)
        if self._layers.stop - 1 in aux_hidden_states:
            aux_hidden_states[self._layers.stop - 1].copy_(residual)

    def _run_head(self, buffers: Buffers) -> None:
        assert buffers.logits is not None
        assert self._norm is not None
        normed = self._kernels.add_norm(buffers.hidden, None, self._norm, self._config.rms_norm_eps)
        buffers.logits.copy_(self._kernels.linear(normed, self._head))

    def _at(self, bucket: int) -> Buffers:
        if bucket not in self._buffers:
            shape = (bucket, self._config.hidden_size)
            hidden = torch.zeros(shape, dtype=self._dtype, device=self._device)
            aux_hidden_states = {
                layer: torch.zeros(shape, dtype=self._dtype, device=self._device)
                for layer in self._aux_layers
                if layer in self._layers
            }
            self._buffers[bucket] = Buffers(
                Batch(bucket, self._device), hidden, None, Forward(hidden, aux_hidden_states)
            )
        return self._buffers[bucket]

    def _check_step(self, step: Step, inputs: Tensor) -> None:
        if step.bucket not in self._buckets:
            raise ValueError(f"bucket {step.bucket} is not one of {self._buckets}")
        rows = step.rows
        expected = (rows,) if self._embedding is not None else (step.bucket, self._config.hidden_size)
        if not 0 < rows <= step.bucket or inputs.shape != expected:
            raise ValueError(
                f"{rows} rows at bucket {step.bucket} do not go with inputs of shape {tuple(inputs.shape)}"
            )
        if len({part[0].slot for part in step.parts}) != len(step.parts):
            raise ValueError("a slot appears twice in one step")
        for part in step.parts:
            check_tree(part)
        for segment in step.segments:
            self._check_span(segment.slot, segment.start, segment.start + segment.count)

    def _check_span(self, slot: int, start: int, stop: int) -> None:
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot {slot} is not in 0..{self._slots - 1}")
        if not 0 <= start < stop <= self._capacity:
            raise ValueError(f"rows {start}..{stop} are not a span within a slot's {self._capacity} rows")

    def copy_rows(self, source: int, target: int, count: int) -> None:
        self._check_span(source, 0, count)
        self._check_span(target, 0, count)
        self._rows[:, :, target, :, :count] = self._rows[:, :, source, :, :count]

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        self._check_span(slot, start, stop)
        return self._rows[:, :, slot, :, start:stop]

    def export_rows(self, slot: int, start: int, stop: int) -> NamedTensors:
        self._check_span(slot, start, stop)
        rows: dict[str, Tensor] = {}
        for index, layer in zip(self._layers, self._blocks, strict=True):
            for part, cache in (("k", layer.k_cache), ("v", layer.v_cache)):
                host = torch.empty(cache.shape[1], stop - start, cache.shape[3], dtype=cache.dtype)
                rows[f"layers.{index}.{part}"] = host.copy_(cache[slot, :, start:stop])
        return rows

    def import_rows(self, slot: int, start: int, rows: NamedTensors) -> None:
        names = {f"layers.{index}.{part}" for index in self._layers for part in "kv"}
        if set(rows) != names:
            odd = sorted(names.symmetric_difference(rows))
            raise ValueError(f"rows of layers {self._layers.start}..{self._layers.stop - 1}: {odd[0]} is odd")
        count = next(iter(rows.values())).shape[1] if next(iter(rows.values())).dim() == 3 else 0
        self._check_span(slot, start, start + count)
        shape = (self._config.num_kv_heads, count, self._config.head_dim)
        for name, tensor in rows.items():
            if tensor.shape != shape or tensor.dtype != self._dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {self._dtype} {list(shape)}")
        for index, layer in zip(self._layers, self._blocks, strict=True):
            layer.k_cache[slot, :, start : start + count] = rows[f"layers.{index}.k"]
            layer.v_cache[slot, :, start : start + count] = rows[f"layers.{index}.v"]

    def export_state(self, slot: int) -> NamedTensors:  # noqa: ARG002
        return {}

    def import_state(self, slot: int, state: NamedTensors) -> None:  # noqa: ARG002
        if state:
            raise ValueError(f"state of layers that have none: {next(iter(state))}")

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def memory(self) -> Mapping[str, int]:
        buffers = self._rope.cos.nbytes + self._rope.sin.nbytes
        for held in tuple(self._buffers.values()):  # asked from other threads, too
            buffers += held.batch.table.nbytes + held.hidden.nbytes
            buffers += 0 if held.logits is None else held.logits.nbytes
            buffers += sum(one.nbytes for one in held.forward.aux_hidden_states.values())
            buffers += 0 if held.tree is None else held.tree.nbytes
        return {"weights": self._weights_bytes, "kv": self._rows.nbytes, "buffers": buffers}

    def close(self) -> None:
        """Give the memory back; the shard is of no use afterwards."""
        self._blocks.clear()
        self._buffers.clear()
        self._embedding = self._norm = self._head = None
        self._rows = self._rows.new_empty(0)


def _check_arguments(
    config: Qwen3Config, layers: range, slots: int, capacity: int, lists: tuple[Sequence[int], Sequence[int]]
) -> None:
    buckets, aux_layers = lists
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= config.num_layers:
        raise ValueError(f"{layers} is not a run of the model's {config.num_layers} layers")
    if slots < 1 or not 1 <= capacity <= config.max_positions:
        raise ValueError(f"{slots} slots of {capacity} rows; accepted: at least 1 of 1..{config.max_positions}")
    if not buckets or any(bucket < 1 for bucket in buckets):
        raise ValueError(f"buckets {tuple(buckets)} are not positive row counts")
    if any(not 0 <= layer < config.num_layers for layer in aux_layers):
        raise ValueError(f"aux_layers {tuple(aux_layers)}: not all in 0..{config.num_layers - 1}")
