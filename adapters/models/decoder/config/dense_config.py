"""Dense decoders: their configuration, and what it says of tensors, products and the probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Protocol, Self

import torch
from attrs import astuple, evolve, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.cache.window_pages import count_shared_rows, count_window_rows
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.layers.attention_layer import (
    list_attention_matrices,
    list_attention_products,
    list_attention_tensors,
)
from adapters.models.decoder.layers.decoder_layer import LayerEnding
from adapters.models.decoder.layers.feed_forward import Matrix, idle_weights
from adapters.models.decoder.layers.latent_layer import LatentShape
from adapters.models.decoder.layers.layer_traits import USUAL, LayerTraits
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.shard_crossing import Crossing
from adapters.models.kernels.formats.row_format import Rows, RowTypes, row_types
from adapters.models.kernels.interfaces.delta_interface import DeltaShape, make_raw_state, make_row_state
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import SMALL, TILE, Heads, Products, Weight

HEAD_ROWS = 64  # logits are asked for of decoded and verified rows, a batch of them at most; of more in turns
PROBED_VOCABULARY = 256  # of a small model whose layers are probed


class RowInputs(Protocol):
    """Inputs that every layer has of its own, made from the tokens of a step."""

    def compute(self, kernels: Kernels, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Return the inputs, `[R, layers, P]`. embedded: the tokens' scaled rows of the embedding."""
        ...


@frozen
class DenseConfig:
    """H query heads and KV key/value heads of `head_dim`; H * head_dim need not equal hidden_size.

    qk_norm: heads of queries and keys are normed. qkv_bias: their projections, and that of values, have a bias.
    output_gate: what is attended is gated. zero_centred: norms multiply with 1 + weight. wide_norms: they multiply with
    the weight in float32.
    by_key_head: of recurrent layers, as `RecurrentShape` says.
    """

    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    output_gate: ClassVar[bool] = False
    zero_centred: ClassVar[bool] = False
    wide_norms: ClassVar[bool] = False
    by_key_head: ClassVar[bool] = False

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: torch.dtype | None = None
    """The dtype of the weights according to config.json; None if it names none."""

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.rope_theta)

    @property
    def traits(self) -> LayerTraits:
        """The parts that this layer has in addition to the usual ones."""
        return USUAL

    @property
    def can_score_prompts(self) -> bool:
        """Return whether the model can score prompts for compression: its layers have nothing but the usual parts."""
        shapes = [self.shape_of(layer) for layer in range(self.num_layers)]
        return all(shape.traits == USUAL and type(shape.rotary) is Rotary for shape in shapes)

    @property
    def embedding_scale(self) -> float:
        """The factor of embedded tokens."""
        return 1.0

    @property
    def logit_cap(self) -> float:
        """The cap of logits, c in c * tanh(logit / c); 0: there is none."""
        return 0.0

    def list_borrowed(self, start: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the layers before `start` whose rows the layers from there on read."""
        return ()

    def find_crossing(self, cut: int, dtype: torch.dtype, rows: Rows) -> Crossing:  # noqa: ARG002
        """Return what crosses from layer `cut - 1` to layer `cut`. dtype: of the computation. rows: their types."""
        return Crossing(self.hidden_size)

    @property
    def delta(self) -> DeltaShape | None:
        """The shape of the recurrent layers; None if there are none."""
        return None

    @property
    def latent(self) -> LatentShape | None:
        """The sizes of attention over compressed rows; None if the layers have other attention."""
        return None

    @property
    def experts(self) -> ExpertsShape | None:
        """The shape of feed-forwards with experts; None if no layer has one."""
        return None

    def shape_of(self, layer: int) -> DenseConfig:  # noqa: ARG002 - here, all layers are alike
        """Return the configuration for one layer. It has no experts if the feed-forward of the layer is dense."""
        return self

    def recurrent(self, layer: int) -> bool:  # noqa: ARG002 - here, all layers attend
        return False

    def recurrent_layers(self, layers: range | None = None) -> int:
        return sum(map(self.recurrent, range(self.num_layers) if layers is None else layers))

    def keeps_rows(self, layer: int) -> bool:
        """Return whether the layer keeps a row for every token."""
        return not self.recurrent(layer) and self.shape_of(layer).traits.keeps_rows

    def kv_bytes_per_token(self, rows: Rows, layers: range | None = None) -> int:
        kept = self._list_kept(range(self.num_layers) if layers is None else layers)
        return sum(self.shape_of(layer).row_bytes(rows) for layer in kept if self.keeps_rows(layer))

    def _list_kept(self, layers: range) -> list[int]:
        """Return the layers that a shard of these layers has memory for: those that it borrows, and its own."""
        return [*self.list_borrowed(layers.start), *layers]

    def check_rows(self, types: RowTypes) -> None:
        """Raise ValueError for formats of rows that the heads of some layer do not have."""
        for shape in map(self.shape_of, filter(self.keeps_rows, range(self.num_layers))):
            types.check_heads(shape.head_dim, latent=bool(shape.traits.latent))

    def row_bytes(self, rows: Rows) -> int:
        """Return the bytes of one row of keys and values in this layer."""
        return self.num_kv_heads * row_types(rows).row_bytes(self.head_dim)

    def state_bytes(self, dtype: torch.dtype, device: str = "cpu", layers: range | None = None) -> tuple[int, int]:
        own = range(self.num_layers) if layers is None else layers
        count = self.recurrent_layers(own)
        held, checkpoint = (self._layer_state(*how, dtype, device) for how in ((1, 0), (0, 1))) if count else (0, 0)
        shapes = [self.shape_of(layer) for layer in self.list_windowed(own)]
        windows = [(shape.row_bytes(dtype), shape.traits.window) for shape in shapes]
        rows = sum(size * count_window_rows(window) for size, window in windows)
        return count * held + rows, count * checkpoint + sum(size * window for size, window in windows)

    def shared_bytes(self, dtype: torch.dtype, bucket: int, layers: range | None = None) -> int:
        """Return the bytes of rows that all slots share: those of a step of this many rows in layers with a window."""
        own = range(self.num_layers) if layers is None else layers
        windowed = self.list_windowed(own)
        if not windowed:
            return 0
        rows = count_shared_rows(bucket, len(windowed), len(self.list_lasting(own)))
        return rows * self.shape_of(windowed[0]).row_bytes(dtype)

    def list_windowed(self, layers: range) -> tuple[int, ...]:
        """Return the layers that keep the rows of their windows alone in a shard of these layers."""
        attending = [layer for layer in self._list_kept(layers) if not self.recurrent(layer)]
        return tuple(layer for layer in attending if self.shape_of(layer).traits.keeps_window)

    def list_lasting(self, layers: range) -> tuple[int, ...]:
        """Return those of `list_windowed` whose rows are read after their own attention, here or in the next shard."""
        sources = {self.shape_of(layer).traits.source for layer in layers if not self.recurrent(layer)}
        read = {*self.list_borrowed(layers.start), *self.list_borrowed(layers.stop), *sources}
        return tuple(layer for layer in self.list_windowed(layers) if layer in read)

    def _layer_state(self, slots: int, checkpoints: int, dtype: torch.dtype, device: str) -> int:
        assert self.delta is not None
        kept = make_raw_state if device == "cuda" else make_row_state
        state = kept(self.delta, slots, checkpoints, dtype, torch.device("meta"))
        return sum(tensor.nbytes for tensor in astuple(state, recurse=False))

    def tensors(self, layers: range | None = None) -> Shapes:
        own = range(self.num_layers) if layers is None else layers
        table = (self.vocab_size, self.hidden_size)
        expected: dict[str, tuple[int, ...]] = {}
        is_last = own.stop == self.num_layers
        if own.start == 0 or (is_last and self.tie_word_embeddings):
            expected["model.embed_tokens.weight"] = table
        for layer in own:
            expected |= self.layer_tensors(layer)
        if is_last:
            expected["model.norm.weight"] = (self.hidden_size,)
            if not self.tie_word_embeddings:
                expected["lm_head.weight"] = table
        return expected

    def layer_tensors(self, layer: int) -> Shapes:
        return list_attention_tensors(self.shape_of(layer), f"model.layers.{layer}.")

    def layer_products(self, layer: int) -> tuple[Weight, ...]:
        return list_attention_products(self.shape_of(layer))

    def products(
        self,
        rows: Sequence[int],
        *,
        capacity: int,
        dtype: torch.dtype,
        threads: int,
        memory: int = 1 << 62,
        layouts: Mapping[str, StepLayout] = {},
    ) -> Products:
        layers = [product for layer in range(self.num_layers) for product in self.layer_products(layer)]
        head = Weight(self.vocab_size, self.hidden_size, most=HEAD_ROWS)
        count = sum(product.outputs * product.inputs * (2 if product.gated else 1) for product in (*layers, head))
        idle = sum(map(self.count_idle_weights, range(self.num_layers)))
        parts = [part for matrix in self.matrices() for part in packed_parts(*matrix, layouts)] if layouts else []
        plain = [part for part in parts if part.layout is None]
        return Products(
            weights=tuple(dict.fromkeys((*layers, head, *plain))),
            packed=tuple(dict.fromkeys(part for part in parts if part.layout is not None)),
            unpacked=(count + idle) * dtype.itemsize <= memory,
            heads=self.list_heads(capacity),
            deltas=(self.delta,) if self.delta is not None and self.recurrent_layers() else (),
            rows=tuple(rows),
            threads=(1 if count * dtype.itemsize <= SMALL else threads, threads),
            wider=(count + idle) * 4 <= memory,
            small=(count + idle) * dtype.itemsize <= SMALL,
        )

    def list_heads(self, capacity: int) -> tuple[Heads, ...]:
        """Return the kinds of attention, over slots of this many rows."""
        shapes = [self.shape_of(layer) for layer in range(self.num_layers) if not self.recurrent(layer)]
        kinds = dict.fromkeys((shape.group, shape.head_dim) for shape in shapes)
        return tuple(Heads(group, size, -(-capacity // TILE) * TILE) for group, size in kinds)

    def count_idle_weights(self, layer: int) -> int:
        """Return the number of the layer's weights that a row is not multiplied with."""
        return idle_weights(self.shape_of(layer))

    def load_ending(self, read: WeightReader, kernels: Kernels, layer: int) -> LayerEnding | None:  # noqa: ARG002
        """Return what is special about the end of a layer; None: nothing is."""
        return None

    def load_row_inputs(self, read: WeightReader, kernels: Kernels) -> RowInputs | None:  # noqa: ARG002
        """Return what gives each layer inputs of its own; None: layers have none."""
        return None

    def layer_matrices(self, layer: int) -> Iterator[Matrix]:
        return list_attention_matrices(self.shape_of(layer), f"model.layers.{layer}.")

    def matrices(self, layers: range | None = None) -> Iterator[Matrix]:
        own = range(self.num_layers) if layers is None else layers
        for layer in own:
            yield from self.layer_matrices(layer)
        if own.stop == self.num_layers:
            name = "model.embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"
            yield Weight(self.vocab_size, self.hidden_size, most=HEAD_ROWS), ((name, self.vocab_size),)

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return the first layer of a small model: all layers are alike.

        Its head is not probed, because the product of the head is proven as all products are.
        """
        return ((self._small(), range(1)),)

    def _small(self, **changes: Any) -> Self:
        changes |= {"vocab_size": PROBED_VOCABULARY, "tie_word_embeddings": False, "dtype": None}
        return evolve(self, **{"num_layers": 2} | changes)


def packed_parts(weight: Weight, tensors: Sequence[tuple[str, int]], layouts: Mapping[str, StepLayout]) -> list[Weight]:
    """Return the weights that a stack of tensors is multiplied as; none if no tensor is packed.

    Neighbours with the same layout become one weight. A gated weight has both halves in one layout, or unpacked.
    """
    found = [(layouts.get(name), rows) for name, rows in tensors]
    kinds = {layout for layout, _ in found}
    if kinds == {None} or (weight.gated and len(kinds) > 1):
        return []
    if weight.gated:
        return [evolve(weight, layout=found[0][0])]
    runs = [(layout, sum(rows for _, rows in run)) for layout, run in groupby(found, lambda part: part[0])]
    return [evolve(weight, outputs=rows, layout=layout) for layout, rows in runs]
