"""Runs the layers of a shard for a step: operation by operation, several in one call, or in pieces.

A piece is what kernels may record as one graph (`Kernels.launch`). Usually all layers are one piece. Layers whose
experts the host computes cut them: a piece ends with what such experts read, the host computes their sums, and the next
piece begins with these. Only static tensors cross from piece to piece: the residual stream, what the piece returned,
and `Buffers.fed`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.cache.recurrent_cache import RecurrentCache
from adapters.models.decoder.cache.window_rows import WindowRows
from adapters.models.decoder.config.dense_config import DenseConfig, RowInputs
from adapters.models.decoder.cpu_experts import CpuExpertsLayer
from adapters.models.decoder.layer_index import LayerIndex, RopeTables
from adapters.models.decoder.layers.attention_heads import finish_attention, scale_queries, select_heads
from adapters.models.decoder.layers.decoder_layer import (
    DecoderLayer,
    begin_feed,
    end_feed,
    end_layer,
    finish_layer_late,
    project_inputs,
)
from adapters.models.decoder.layers.layer_buffers import Buffers
from adapters.models.decoder.layers.recurrent_layer import DeltaLayer
from adapters.models.decoder.layers.tree_attention import TreeGroups
from adapters.models.decoder.shard import FindCaches, PositionalStates, ShardSpec
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.row_kernels import Delta, add_delta
from adapters.models.kernels.layer_kinds import skipped_layers
from adapters.models.kernels.step_batch import Batch


@define(eq=False)
class LayerRunner:
    """The layers of one shard. layers: their weights, in order. embedding: None if these are not the first layers.

    find_caches: as in `OutputHead`. states: of recurrent layers.
    """

    config: DenseConfig
    kernels: Kernels
    spec: ShardSpec
    layers: Sequence[DecoderLayer | DeltaLayer]
    embedding: Tensor | None
    row_inputs: RowInputs | None
    ropes: RopeTables
    layout: LayerIndex
    states: PositionalStates
    find_caches: FindCaches
    embedding_scale: float = field(init=False)
    _cuts: tuple[int, ...] = field(init=False)  # layers whose experts the host computes

    @embedding_scale.default
    def _round_scale(self) -> float:
        return float(torch.tensor(self.config.embedding_scale, dtype=self.spec.dtype))

    @_cuts.default
    def _find_cuts(self) -> tuple[int, ...]:
        numbered = zip(self.spec.layers, self.layers, strict=True)
        return tuple(number for number, layer in numbered if isinstance(layer.frame.feed, CpuExpertsLayer))

    def run(
        self,
        launch: Callable[[str, Callable[[], Tensor | None]], Tensor | None],
        buffers: Buffers,
        tree: TreeGroups | None = None,
        *,
        early: bool = False,
    ) -> None:
        """Run all layers of a step. launch: runs a piece, by its name.

        early: the last layer stops once its keys and values, or its state, are written.
        """
        skipped = skipped_layers(self.spec.layers, self.layers) if self.spec.device.type == "cuda" else ()
        last = self.spec.layers.stop - 1
        before: int | None = None
        for cut in self._cuts:
            if cut in skipped or (early and cut == last):
                continue
            x = launch(f"to {cut}", partial(self._run_until_feed, buffers, tree, skipped, before=before, cut=cut))
            feed = self._layer(cut).frame.feed
            assert x is not None
            assert isinstance(feed, CpuExpertsLayer)
            feed.run(self.kernels, x, buffers.batch, out=buffers.make_fed())
            before = cut
        launch("", partial(self._run_to_end, buffers, tree, skipped, before=before, early=early))

    def _layer(self, number: int) -> DecoderLayer | DeltaLayer:
        return self.layers[number - self.spec.layers.start]

    def _run_until_feed(
        self, buffers: Buffers, tree: TreeGroups | None, skipped: Container[int], *, before: int | None, cut: int
    ) -> Tensor:
        """Run the layers behind the cut `before` up to what the experts of layer `cut` read, which is returned."""
        delta = self._run_span(buffers, tree, skipped, before=before, stop=cut)
        mixed = self._mix(cut, buffers, delta, tree, stops=False)
        assert mixed is not None
        return begin_feed(self.kernels, self._layer(cut).frame, buffers.hidden, mixed)

    def _run_to_end(
        self, buffers: Buffers, tree: TreeGroups | None, skipped: Container[int], *, before: int | None, early: bool
    ) -> None:
        """Run the layers behind the cut `before`."""
        delta = self._run_span(buffers, tree, skipped, before=before, stop=self.spec.layers.stop, early=early)
        if delta is not None:
            add_delta(buffers.hidden, delta)

    def _run_span(
        self,
        buffers: Buffers,
        tree: TreeGroups | None,
        skipped: Container[int],
        *,
        before: int | None,
        stop: int,
        early: bool = False,
    ) -> Delta | None:
        """Run the layers behind the cut `before`, or from the first one, up to `stop`. Return what must still be added
        to the residual stream.
        """
        residual = buffers.hidden
        fused_layers = buffers.fused_layers if tree is None else {}
        delta: Delta | None = None
        if before is None:
            number = self.spec.layers.start
            if number not in fused_layers:
                self._embed(buffers)
        else:
            number = before + 1
            delta = end_feed(self.kernels, self._layer(before).frame, buffers.make_fed())
        while number < stop:
            end, whole = fused_layers.get(number, (number + 1, None))
            stops = early and end == self.spec.layers.stop
            if whole is None and number not in skipped:
                delta = self.run_layer(number, buffers, delta, tree, stops=stops)
            elif whole is not None:
                if delta is not None:
                    add_delta(residual, delta)
                delta = None
                whole.run(residual, buffers.batch, stops=stops)
            number = end
        return delta

    def _embed(self, buffers: Buffers) -> None:
        if self.embedding is None:
            return
        residual = buffers.hidden
        self.kernels.embed(self.embedding, buffers.batch.tokens, out=residual)
        if self.config.embedding_scale != 1:
            residual.mul_(self.embedding_scale)
        if self.row_inputs is not None:
            buffers.row_inputs = self.row_inputs.compute(self.kernels, buffers.batch.tokens, residual)

    def run_layer(
        self, number: int, buffers: Buffers, delta: Delta | None, tree: TreeGroups | None, *, stops: bool
    ) -> Delta | None:
        """Run one layer, operation by operation. stops: as `early` in `run`."""
        kernels = self.kernels
        residual = buffers.hidden
        layer = self._layer(number)
        mixed = self._mix(number, buffers, delta, tree, stops=stops)
        if mixed is None:
            return None
        if isinstance(layer, DeltaLayer) or layer.ending is None:
            return finish_layer_late(kernels, layer.frame, residual, mixed, buffers.batch)
        inputs = None if buffers.row_inputs is None else buffers.row_inputs[:, number - self.spec.layers.start]
        end_layer(kernels, layer, residual, mixed, buffers.batch, inputs=inputs)
        return None

    def _mix(
        self, number: int, buffers: Buffers, delta: Delta | None, tree: TreeGroups | None, *, stops: bool
    ) -> Tensor | None:
        """Run a layer up to what attention or the recurrence returns. None if it stops."""
        kernels = self.kernels
        batch = buffers.batch
        layer = self._layer(number)
        index = self.layout.indices.get(number, 0)
        own = project_inputs(kernels, layer.frame, buffers.hidden, delta)
        if (before := buffers.forward.aux_hidden_states.get(number - 1)) is not None:
            before.copy_(buffers.hidden)
        if isinstance(layer, DeltaLayer):
            assert kernels.delta is not None
            assert isinstance(self.states, RecurrentCache)
            mixed = layer.mix(kernels.delta, own, self.states.layers[index], batch)
        elif tree is not None:
            attended = tree.attend(layer, self.layout.find_owner(number), select_heads(kernels, layer, own))
            mixed = finish_attention(kernels, layer, attended, own)
        else:
            found = self._attend(number, layer, own, batch, stops=stops)
            if found is None:
                return None
            mixed = finish_attention(kernels, layer, found, own)
        return None if stops else mixed

    def _attend(self, number: int, layer: DecoderLayer, own: Tensor, batch: Batch, *, stops: bool) -> Tensor | None:
        """Write the layer's keys and values, unless another layer has them, and attend. stops: as in `run_layer`."""
        kernels = self.kernels
        k_cache, v_cache, pages = self.find_caches(number)
        batch = batch.with_pages(pages)
        rope = self.ropes.of_layer(number)
        projected = select_heads(kernels, layer, own)
        if layer.source is None:
            q = kernels.rotate_store(projected, layer.prep, rope, batch, k_cache, v_cache)
        elif not stops:
            q = kernels.rotate_queries(projected, layer.prep, rope, batch, k_cache)
        if stops:
            return None
        found = kernels.attend(scale_queries(q, rope, batch), k_cache, v_cache, batch, layer.rule)
        if layer.rule.window and isinstance(self.states, WindowRows) and layer.source is None:
            self.states.finish_layer(self.layout.indices[number])
        return found

    def list_attending(
        self, caches: Sequence[tuple[Tensor, Tensor]]
    ) -> Mapping[int, tuple[DecoderLayer, tuple[Tensor, Tensor]]]:
        """Return the layers with attention, by number, with their caches."""
        layers = zip(self.spec.layers, self.layers, strict=True)
        indices = self.layout.indices
        return {number: (layer, caches[indices[number]]) for number, layer in layers if isinstance(layer, DecoderLayer)}

    def close(self) -> None:
        self.layers = ()
        self.embedding = None
        self.row_inputs = None
