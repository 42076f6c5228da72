"""A dense decoder on one device: a range of layers with slots, KV caches and states, as fixed-shape forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.cache.window_rows import WindowRows
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.layered_config import LayeredConfig
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.layer_index import (
    LayerIndex,
    RopeTables,
    build_crossing_port,
    build_rows,
    build_states,
    build_trees,
)
from adapters.models.decoder.layer_runner import LayerRunner
from adapters.models.decoder.layers.attention_layer import load_attention_layer
from adapters.models.decoder.layers.decoder_layer import DecoderLayer
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.layers.layer_buffers import Buffers, fuse_layers
from adapters.models.decoder.layers.recurrent_layer import DeltaLayer, load_delta_layer
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.pipeline.pipelined_chunks import use_inference_mode
from adapters.models.decoder.shard import Kept, OutputHead, ShardPlacement, ShardSpec
from adapters.models.decoder.shard_checks import check_arguments, check_step
from adapters.models.kernels.activations import cap_logits
from adapters.models.kernels.interfaces.decode_pass import DecodePass
from adapters.models.kernels.interfaces.layer_interface import NARROW, Kernels
from adapters.models.kernels.offload import count_bytes
from adapters.models.kernels.step import Forward, Step
from adapters.models.kernels.step_batch import StateBatch

T = TypeVar("T")


def run_piece(_: str, body: Callable[[], T]) -> T:
    """Run a piece of a body as it is."""
    return body()


class DenseShard:
    """Layers `[first, last)` on one device; the embedding with layer 0, final norm and head with the last layer.

    placement: see `ShardPlacement`. offloaded: has the experts' weights; None: this shard has them itself. cpu_experts:
    compute the experts of their layers on the host.
    """

    def __init__(
        self,
        config: DenseConfig,
        weights: WeightSource,
        kernels: Kernels,
        placement: ShardPlacement | None = None,
        *,
        offloaded: HostExperts | None = None,
        cpu_experts: CpuExperts | None = None,
    ) -> None:
        placement = ShardPlacement() if placement is None else placement
        device = placement.device
        self.config = config
        self._kernels = kernels
        self._offloaded = offloaded
        self._cpu_experts = cpu_experts
        layers = range(config.num_layers) if placement.layers is None else placement.layers
        check_arguments(config, layers, placement)
        self.spec = ShardSpec(
            layers=layers,
            slots=placement.slots,
            capacity=-(-placement.capacity // kernels.kv_tile) * kernels.kv_tile,
            buckets=tuple(placement.buckets),
            vocab_size=config.vocab_size,
            device=device,
            dtype=placement.dtype,
            # Experts in host memory make the host wait for the router's choice in each layer.
            runs_ahead=device.type == "cuda" and offloaded is None and cpu_experts is None,
            cpu_experts=range(0) if cpu_experts is None else cpu_experts.layers,
        )
        self._aux_layers = tuple(placement.aux_layers)
        self._buffers: dict[int, Buffers] = {}
        self._scaled_embedding: Tensor | None = None  # made for a draft, if the embedding is scaled
        self._ropes = RopeTables(config, self.spec.capacity, device)
        self._layout = LayerIndex(config, layers)
        self.rows = build_rows(config, self._layout, self.spec, placement, paged=kernels.is_paged)
        self.states = build_states(config, self._layout, self.spec, placement, kernels)
        self._crossing = build_crossing_port(config, layers, placement, self._find_cache)
        self._load(
            WeightReader(weights, device, placement.dtype, offloaded, config.wide_norms),
            offload_embedding=placement.offload_embedding,
        )

    def _load(self, read: WeightReader, *, offload_embedding: bool) -> None:
        config = self.config
        kernels = self._kernels
        last = self.spec.layers.stop == config.num_layers
        self._stops = last and self.spec.layers.stop - 1 not in self._aux_layers
        needed = self.spec.layers.start == 0 or (last and config.tie_word_embeddings)
        table = read.table(on_host=offload_embedding and not config.tie_word_embeddings) if needed else None
        self._embedding = table if self.spec.layers.start == 0 else None
        decoder = [self._load_layer(read, layer) for layer in self.spec.layers]
        row_inputs = None if self._embedding is None else config.load_row_inputs(read, kernels)
        self._runner = LayerRunner(
            config,
            kernels,
            self.spec,
            decoder,
            self._embedding,
            row_inputs,
            self._ropes,
            self._layout,
            self.states,
            self._find_caches,
        )
        self._norm = read.norm("model.norm.weight", zero_centred=config.zero_centred) if last else None
        self._head: Any = kernels.pack(read.head(table if config.tie_word_embeddings else None)) if last else None
        self._host_bytes = 0 if table is None or table.device.type == self.spec.device.type else table.nbytes
        self._weights_bytes = (
            count_bytes((self._embedding, self._norm, self._head, decoder, row_inputs)) - self._host_bytes
        )
        if self._cpu_experts is not None:
            self._host_bytes += self._cpu_experts.host_bytes
            self._weights_bytes += self._cpu_experts.device_bytes

    def _load_layer(self, read: WeightReader, layer: int) -> DecoderLayer | DeltaLayer:
        shape = self.config.shape_of(layer)
        prefix = f"model.layers.{layer}."
        if self._cpu_experts is not None and layer in self._cpu_experts.layers:
            read = evolve(read, cpu_experts=self._cpu_experts)
        if self.config.recurrent(layer):
            return load_delta_layer(read, self._kernels, shape, prefix)
        found = load_attention_layer(read, self._kernels, shape, prefix)
        ending = self.config.load_ending(read, self._kernels, layer)
        return found if ending is None else evolve(found, ending=ending)

    @property
    def embedding(self) -> Tensor:
        if self._embedding is None:
            raise ValueError(f"layers {self.spec.layers.start}..{self.spec.layers.stop - 1} lack the embedding")
        if self.config.embedding_scale == 1:
            return self._embedding
        if self._scaled_embedding is None:
            self._scaled_embedding = self._embedding * self._runner.embedding_scale
        return self._scaled_embedding

    @property
    def output(self) -> OutputHead:
        if self._norm is None:
            raise ValueError(f"layers {self.spec.layers.start}..{self.spec.layers.stop - 1} lack the head")
        return OutputHead(self._head, self._norm, self._find_caches)

    def forward(self, step: Step, inputs: Tensor) -> Forward:
        self._check_step(step, inputs)
        buffers = self._at(step.bucket)
        with use_inference_mode():
            buffers.batch.before = self.states.start(step)
            with self.states.settling(step):
                if self._embedding is None:
                    self._crossing.receive(step, inputs, buffers)
                buffers.batch.settle(step)
                buffers.batch.load(step, None if self._embedding is None else inputs)
                self._kernels.prepare_step(buffers.batch)
                if step.branches:
                    self._run_tree(buffers, step)
                else:
                    self._run_chains(buffers, step)
        return buffers.forward

    def _run_chains(self, buffers: Buffers, step: Step) -> None:
        """Run a step without trees, and leave what the next shard is given."""
        # Only the model's last layer may stop early, and only if its result is not needed. A narrow step does not
        # stop early on CUDA: recording a second graph at the start would cost more time than it could save.
        early = step.rows_only and self._stops and not (self.spec.runs_ahead and step.bucket <= NARROW)
        name = "rows" if early else "layers"
        if self.states.specs and not early:
            name = buffers.batch.kind
        self._runner.run(self._launcher(name, buffers), buffers, early=early)
        self._crossing.leave(step, buffers)

    def settling(self, step: Step) -> AbstractContextManager[None]:
        return self.states.restoring(step)

    def _run_tree(self, buffers: Buffers, step: Step) -> None:
        """Run a step with trees. Its shape changes from step to step, so no CUDA graph is recorded of it."""
        if buffers.tree is None:
            buffers.tree = build_trees(self._kernels, step.bucket, self._layout, self._ropes, self._find_cache)
        buffers.tree.load(step)
        launch = run_piece if self.spec.device.type == "cuda" else self._launcher("tree", buffers)
        self._runner.run(launch, buffers, buffers.tree)

    def _launcher(self, name: str, buffers: Buffers) -> Callable[[str, Callable[[], T]], T]:
        """Return what launches the pieces of a body."""
        return lambda piece, body: self._kernels.launch(name, buffers.batch, body, piece=piece)

    def commit(self, step: Step, kept: Sequence[Kept]) -> None:
        if len(kept) != len(step.parts):
            raise ValueError(f"{len(kept)} answers for a step of {len(step.parts)} slots")
        tree = self._at(step.bucket).tree
        with use_inference_mode():
            self.states.commit(step, kept)
            if step.branches and tree is not None:
                tree.settle(step, kept)

    def logits(self, step: Step, hidden: Tensor) -> Tensor:
        """Return the logits, float32 `[bucket, V]`, in a static buffer. Its padded rows mean nothing."""
        buffers = self._at(step.bucket)
        if self._norm is None:
            raise ValueError(f"logits: layers {self.spec.layers.start}..{self.spec.layers.stop - 1} have no head")
        logits = buffers.logits_of(self.config.vocab_size)
        with use_inference_mode():
            if hidden is not buffers.hidden:
                buffers.hidden.copy_(hidden)
            given = (buffers.hidden, self._norm, self.config.rms_norm_eps, self._head, logits)
            self._kernels.launch("logits", buffers.batch, lambda: self._write_logits(*given))
        return logits

    def _write_logits(self, hidden: Tensor, norm: Tensor, eps: float, head: Any, logits: Tensor) -> None:
        self._kernels.write_logits(hidden, norm, eps, head, logits)
        if self.config.logit_cap:
            cap_logits(logits, self.config.logit_cap)

    def build_pass(self, bucket: int) -> DecodePass | None:
        """Return the whole model as one call of the compiled library.

        Return None if the library cannot run it in one call, or if it has positional state.
        """
        buffers = self._at(bucket)
        stop, layers = buffers.fused_layers.get(0, (0, None))
        if layers is None or self._norm is None or stop < self.config.num_layers or self.states.specs:
            return None
        ending = (self._norm, self.config.rms_norm_eps, self._head)
        logits = buffers.logits_of(self.spec.vocab_size)
        return self._kernels.build_pass(layers, ending, buffers.batch, buffers.forward, logits)

    def _find_caches(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        cache, index = self._find_cache(self._layout.find_owner(number))
        return *cache.layers[index], cache.find_table(index)

    def _find_cache(self, number: int) -> tuple[KvCache, int]:
        """Return the cache of the rows that a layer keeps, and the layer's index in it."""
        index = self._layout.indices[number]
        if number in self._layout.windowed:
            assert isinstance(self.states, WindowRows)
            return self.states.cache, index
        return self.rows, index

    def _at(self, bucket: int) -> Buffers:
        if bucket not in self._buffers:
            hidden = torch.zeros(bucket, self.config.hidden_size, dtype=self.spec.dtype, device=self.spec.device)
            aux_hidden_states = {
                layer: torch.zeros_like(hidden) for layer in self._aux_layers if layer in self.spec.layers
            }
            if self.spec.layers.stop - 1 in aux_hidden_states:
                aux_hidden_states[self.spec.layers.stop - 1] = hidden  # as the last layer leaves it
            batch = StateBatch(bucket, self.spec.device, pages=self.rows.table)
            forward = Forward(self._crossing.make_left(hidden), aux_hidden_states)
            rope = self._ropes.of_layer(self.spec.layers.start)
            fused_layers = fuse_layers(self._kernels, self._attending(), rope, forward, self._embedding)
            self._buffers[bucket] = Buffers(batch, hidden, None, forward, fused_layers)
            if self._embedding is None:
                layer_count = self.config.num_layers - self.spec.layers.start
                self._buffers[bucket].row_inputs = self._crossing.make_inputs(hidden, layer_count)
        return self._buffers[bucket]

    def _attending(self) -> Mapping[int, tuple[DecoderLayer, tuple[Tensor, Tensor]]]:
        """Return the layers that may be fused, by number, with their caches: none where layers are of several kinds."""
        return {} if isinstance(self.config, LayeredConfig) else self._runner.list_attending(self.rows.layers)

    def _check_step(self, step: Step, inputs: Tensor) -> None:
        expected = (step.rows,) if self._embedding is not None else (step.bucket, self._crossing.given.width)
        check_step(step, inputs, expected, self.spec.buckets)
        for segment in step.segments:
            self.rows.check_span(segment.slot, segment.start, segment.start + segment.count)

    def synchronize(self) -> None:
        if self.spec.device.type == "cuda":
            torch.cuda.current_stream(self.spec.device).synchronize()

    def memory(self) -> Mapping[str, int]:
        buffers = sum(held.nbytes for held in tuple(self._buffers.values()))  # asked from other threads, too
        buffers += self._ropes.nbytes
        scaled = 0 if self._scaled_embedding is None else self._scaled_embedding.nbytes
        weights = self._weights_bytes + scaled + (0 if self._offloaded is None else self._offloaded.device_bytes)
        kv = self.rows.nbytes + self.states.nbytes
        return {"weights": weights, "host": self._host_bytes, "kv": kv, "buffers": buffers}

    def close(self) -> None:
        """Give the memory back; the shard is of no use afterwards."""
        self._runner.close()
        self._buffers.clear()
        self._embedding = self._scaled_embedding = self._norm = self._head = None
        self.rows.close()
        self.states.close()
        for experts in (self._offloaded, self._cpu_experts):
            if experts is not None:
                experts.close()
