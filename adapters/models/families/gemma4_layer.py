"""The parts that only layers of Gemma 4 have.

They are a factor behind a layer, inputs of each layer's own, and experts parallel to an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.cpu_experts import CpuExpertsLayer
from adapters.models.decoder.layers.decoder_layer import FedRows, Frame
from adapters.models.decoder.layers.feed_forward import (
    Matrix,
    feed_matrices,
    feed_products,
    feed_tensors,
    load_feed,
    run_chosen_experts,
)
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.kernels.activations import apply_activation
from adapters.models.kernels.interfaces.experts_interface import Experts, ExpertsShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.interfaces.row_kernels import NormedRows
from adapters.models.kernels.step_batch import Batch

_PARALLEL_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


@frozen
class SparseFeed:
    """The experts of a layer, which are parallel to its MLP, as a `FeedShape`."""

    hidden_size: int
    intermediate_size: int
    experts: ExpertsShape
    traits: LayerTraits


@frozen
class EndingShape:
    """The special parts of one layer. inputs: numbers of its own inputs; 0: none. sparse: its experts; None: none."""

    hidden_size: int
    inputs: int
    sparse: SparseFeed | None

    def list_tensors(self) -> Shapes:
        hidden = self.hidden_size
        found: dict[str, tuple[int, ...]] = {"layer_scalar": (1,)}
        if self.inputs:
            found |= {
                "per_layer_input_gate.weight": (self.inputs, hidden),
                "per_layer_projection.weight": (hidden, self.inputs),
                "post_per_layer_input_norm.weight": (hidden,),
            }
        if self.sparse is not None:
            found |= {f"{name}.weight": (hidden,) for name in _PARALLEL_NORMS} | feed_tensors(self.sparse)
            found |= {"router.scale": (hidden,), "router.per_expert_scale": (self.sparse.experts.count,)}
        return found

    def list_products(self) -> tuple[Weight, ...]:
        own = (Weight(self.inputs, self.hidden_size), Weight(self.hidden_size, self.inputs)) if self.inputs else ()
        return own if self.sparse is None else (*own, *feed_products(self.sparse))

    def list_matrices(self, prefix: str) -> Iterator[Matrix]:
        if self.inputs:
            gate, out = self.list_products()[:2]
            yield gate, ((f"{prefix}per_layer_input_gate.weight", self.inputs),)
            yield out, ((f"{prefix}per_layer_projection.weight", self.hidden_size),)
        if self.sparse is not None:
            yield from feed_matrices(self.sparse, prefix)


@frozen(eq=False)
class OwnInputs:
    """The weights by which a layer adds its own inputs: `norm(out @ (gelu(gate @ x) * inputs))`."""

    gate: Any
    out: Any
    norm: Tensor


@frozen(eq=False)
class ParallelExperts:
    """The experts parallel to the MLP. Both read the residual stream behind their norms, and their sum is normed.

    deciding: the norm of what the router reads. after_mlp, before, after: norms behind the MLP, and around the experts.
    """

    experts: Experts | CpuExpertsLayer
    deciding: Tensor
    after_mlp: Tensor
    before: Tensor
    after: Tensor


@frozen(eq=False)
class Gemma4Ending:
    """Implements `LayerEnding`. factor: of the residual stream behind the layer."""

    eps: float
    factor: float
    activation: str
    own: OwnInputs | None
    parallel: ParallelExperts | None

    @property
    def parallel_norms(self) -> Sequence[Tensor]:
        return () if self.parallel is None else (self.parallel.deciding, self.parallel.before)

    def end(self, kernels: Kernels, frame: Frame, residual: Tensor, fed: FedRows, batch: Batch) -> None:
        assert frame.after_feed is not None, "all layers of the family norm what their feed-forward returns"
        own = self.own
        parallel = None
        if self.parallel is not None:
            deciding, x = fed.parallel
            sparse = run_chosen_experts(kernels, self.parallel.experts, x, batch, deciding)
            parallel = (sparse, self.parallel.after, self.parallel.after_mlp)
        factor = self.factor if own is None or fed.inputs is None else 1.0
        kernels.add_normed(residual, NormedRows(fed.found, frame.after_feed, parallel, factor), self.eps)
        if own is not None and fed.inputs is not None:
            gate = apply_activation(self.activation, kernels.linear(residual, own.gate)).mul_(fed.inputs)
            made = NormedRows(kernels.linear(gate, own.out), own.norm, factor=self.factor)
            kernels.add_normed(residual, made, self.eps)


def load_ending(
    read: WeightReader, kernels: Kernels, shape: EndingShape, prefix: str, *, eps: float, activation: str
) -> Gemma4Ending:
    own = parallel = None
    if shape.inputs:
        own = OwnInputs(
            kernels.pack(read.matrix(f"{prefix}per_layer_input_gate.weight")),
            kernels.pack(read.matrix(f"{prefix}per_layer_projection.weight")),
            read.wide(f"{prefix}post_per_layer_input_norm.weight"),
        )
    if shape.sparse is not None:
        parallel = _load_experts(read, kernels, shape.sparse, prefix)
    factor = float(read(f"{prefix}layer_scalar"))
    return Gemma4Ending(eps, factor, activation, own, parallel)


def _load_experts(read: WeightReader, kernels: Kernels, shape: SparseFeed, prefix: str) -> ParallelExperts:
    experts = load_feed(read, kernels, shape, prefix)
    scales = read.wide(f"{prefix}router.per_expert_scale")
    if isinstance(experts, CpuExpertsLayer):
        experts.set_scales(scales)
    else:
        assert isinstance(experts, Experts)
        experts = evolve(experts, scales=scales)
    deciding = read.wide(f"{prefix}router.scale") * shape.hidden_size**-0.5
    return ParallelExperts(experts, deciding, *(read.wide(f"{prefix}{name}.weight") for name in _PARALLEL_NORMS))


@frozen
class InputsShape:
    """The inputs that all layers have of their own: `size` numbers for each layer and token."""

    layers: int
    size: int
    vocabulary: int
    hidden_size: int

    def list_tensors(self) -> Shapes:
        width = self.layers * self.size
        return {
            "model.embed_tokens_per_layer.weight": (self.vocabulary, width),
            "model.per_layer_model_projection.weight": (width, self.hidden_size),
            "model.per_layer_projection_norm.weight": (self.size,),
        }

    @property
    def product(self) -> Weight:
        return Weight(self.layers * self.size, self.hidden_size)


@frozen(eq=False)
class Gemma4Inputs:
    """Implements `RowInputs`: a row of a second embedding, and a projection of the token's first one, normed."""

    shape: InputsShape
    table: Tensor
    projection: Any
    norm: Tensor
    eps: float
    _scale: float = field(init=False)

    @_scale.default
    def _round_scale(self) -> float:
        return float(torch.tensor(self.shape.size**0.5, dtype=self.table.dtype))

    def compute(self, kernels: Kernels, tokens: Tensor, embedded: Tensor) -> Tensor:
        shape = self.shape
        rows = len(tokens)
        projected = kernels.linear(embedded, self.projection).mul_(shape.hidden_size**-0.5)
        context = kernels.add_norm(projected.view(rows * shape.layers, shape.size), None, self.norm, self.eps)
        own = embedded.new_empty(rows, shape.layers * shape.size)
        kernels.embed(self.table, tokens, out=own).mul_(self._scale)
        return context.view(rows, shape.layers, shape.size).add_(own.view(rows, shape.layers, shape.size)).mul_(2**-0.5)


def load_inputs(read: WeightReader, kernels: Kernels, shape: InputsShape, eps: float) -> Gemma4Inputs:
    table, projection, norm = shape.list_tensors()
    return Gemma4Inputs(shape, read(table), kernels.pack(read.matrix(projection)), read.wide(norm), eps)
