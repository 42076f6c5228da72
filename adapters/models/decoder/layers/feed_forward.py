"""A layer's feed-forward, dense or with experts: its tensors by their published names, and its products.

Each expert has tensors of its own, `mlp.experts.N.gate_proj.weight`. Checkpoints that stack the tensors of all experts
are cut into these when they are opened (`cut_up`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeAlias

import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.config_fields import LIMITS
from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.checkpoint.safetensors_folder import StoredTensor, TensorEntry
from adapters.models.decoder.cpu_experts import CpuExperts, CpuExpertsLayer
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.kernels.activations import SILU
from adapters.models.kernels.interfaces.expert_kernels import PackingKernels
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    ExpertsShape,
    GatedWeights,
    SigmoidExpertsShape,
    run_feed_forward,
)
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.step_batch import Batch

ROUTER_BIAS = "mlp.gate.bias"
CORRECTION = "mlp.gate.e_score_correction_bias"
_STACKED = re.compile(r"(.*\bmlp\.experts\.)(gate_up_proj|down_proj)")


Feed: TypeAlias = GatedWeights | Experts | CpuExpertsLayer
"""The weights of a feed-forward: dense, with experts, or with experts that the host computes."""
Matrix: TypeAlias = tuple[Weight, tuple[tuple[str, int], ...]]
"""A weight, and the tensors that are stacked to make it, each with its number of rows."""


class FeedShape(Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def experts(self) -> ExpertsShape | None:
        """The experts; None if the feed-forward is dense and has `intermediate_size` columns."""
        ...

    @property
    def traits(self) -> LayerTraits: ...


def feed_tensors(shape: FeedShape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden_size
    experts = shape.experts
    if experts is None:
        return _gated_tensors("mlp.", hidden, shape.intermediate_size)
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, hidden)}
    biased = isinstance(experts, BiasedExpertsShape)
    if name := _name_correction(experts):
        found[name] = (experts.count,)
    for number in range(experts.count):
        found |= _gated_tensors(f"mlp.experts.{number}.", hidden, experts.inner, biased=biased)
    if experts.shared:
        found |= _gated_tensors("mlp.shared_expert.", hidden, experts.shared)
    if experts.gates_shared:
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found


def _name_correction(experts: ExpertsShape) -> str:
    """Return the name of what is added to the router's scores or logits; "" if nothing is."""
    if isinstance(experts, BiasedExpertsShape):
        return ROUTER_BIAS
    return CORRECTION if isinstance(experts, SigmoidExpertsShape) else ""


def _gated_tensors(prefix: str, hidden: int, inner: int, *, biased: bool = False) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    found: dict[str, tuple[int, ...]] = {f"{prefix}{part}_proj.weight": size for part, size in sizes.items()}
    return found | ({f"{prefix}{part}_proj.bias": size[:1] for part, size in sizes.items()} if biased else {})


def feed_products(shape: FeedShape) -> tuple[Weight, ...]:
    """Return the weights that a row is multiplied with, each as often as that happens.

    The router of the few experts that are probed is among them.
    """
    hidden = shape.hidden_size
    experts = shape.experts
    if experts is None:
        return _gated_products(shape, shape.intermediate_size)
    shared = _gated_products(shape, experts.shared) if experts.shared else ()
    routers = (Weight(experts.router_outputs, hidden), Weight(experts.shrink_for_probe().router_outputs, hidden))
    return (*routers, *_gated_products(shape, experts.inner) * experts.chosen, *shared)


def _gated_products(shape: FeedShape, inner: int) -> tuple[Weight, ...]:
    """Return the two products. Only a gate by SiLU is part of the first one."""
    hidden = shape.hidden_size
    gated = shape.traits.activation == SILU
    return Weight(inner if gated else 2 * inner, hidden, gated=gated), Weight(hidden, inner)


def feed_matrices(shape: FeedShape, prefix: str) -> Iterator[Matrix]:
    experts = shape.experts
    if experts is None:
        yield from _gated_matrices(shape, shape.intermediate_size, f"{prefix}mlp.")
        return
    for number in range(experts.count):
        yield from _gated_matrices(shape, experts.inner, f"{prefix}mlp.experts.{number}.")
    if experts.shared:
        yield from _gated_matrices(shape, experts.shared, f"{prefix}mlp.shared_expert.")


def _gated_matrices(shape: FeedShape, inner: int, prefix: str) -> Iterator[Matrix]:
    gated, down = _gated_products(shape, inner)
    yield gated, tuple((f"{prefix}{part}_proj.weight", inner) for part in ("gate", "up"))
    yield down, ((f"{prefix}down_proj.weight", shape.hidden_size),)


def idle_weights(shape: FeedShape) -> int:
    """Return the number of weights that a row is not multiplied with: those of the experts that it does not use."""
    experts = shape.experts
    return 0 if experts is None else 3 * (experts.count - experts.chosen) * experts.inner * shape.hidden_size


class FeedReader(Protocol):
    @property
    def offloaded(self) -> HostExperts | None:
        """The experts in host memory, to which experts are added; None: they stay on the device."""
        ...

    @property
    def cpu_experts(self) -> CpuExperts | None:
        """The experts that the host computes, to which those of this layer are added; None: the device has them."""
        ...

    @property
    def on_host(self) -> FeedReader:
        """The reader of experts that the host computes, onto the host."""
        ...

    def __call__(self, *names: str) -> Tensor:
        """Return the named tensors, stacked along their rows, in the model's dtype."""
        ...

    def matrix(self, *names: str) -> StackedWeight:
        """Return the named tensors, stacked along their rows."""
        ...

    def wide(self, name: str) -> Tensor:
        """Return one tensor in float32."""
        ...


def load_feed(read: FeedReader, kernels: Kernels, shape: FeedShape, prefix: str) -> Feed:
    """Load the feed-forward of the layer whose names begin with `prefix`."""
    experts = shape.experts
    if experts is None:
        return _load_gated(read, kernels, shape, f"{prefix}mlp")
    shared = _load_gated(read, kernels, shape, f"{prefix}mlp.shared_expert") if experts.shared else None
    if read.cpu_experts is None:
        return evolve(_load_experts(read, kernels, shape, prefix), shared=shared)
    return read.cpu_experts.add_layer(_load_experts(read.on_host, read.cpu_experts.kernels, shape, prefix), shared)


def _load_gated(
    read: FeedReader, kernels: PackingKernels, shape: FeedShape, name: str, *, packed: bool = True
) -> GatedWeights:
    gate, up, down = (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    both = read.matrix(gate, up)
    own = read.matrix(down)
    activation = shape.traits.activation
    is_built_in = activation in kernels.built_in_gates
    pack_both = partial(kernels.pack_gated, activation=activation) if is_built_in else kernels.pack
    biases: list[Tensor] = []
    if isinstance(shape.experts, BiasedExpertsShape):
        gate_bias, up_bias, down_bias = (weight.replace("weight", "bias") for weight in (gate, up, down))
        biases = [read(gate_bias, up_bias), read(down_bias)]
    if not packed:
        return GatedWeights(pack_both(both.unpack()), kernels.pack(own.unpack()), activation, *biases)
    return GatedWeights(pack_both(both), kernels.pack(own), activation, *biases)


def _load_experts(read: FeedReader, kernels: PackingKernels, shape: FeedShape, prefix: str) -> Experts:
    """Load router and experts, without the shared expert."""
    experts = shape.experts
    assert experts is not None
    correction = _name_correction(experts)
    numbers = range(experts.count)
    packed = kernels.packs_experts
    gates = ("gate", "shared_expert_gate") if experts.gates_shared else ("gate",)
    router = kernels.pack_router(read.matrix(*(f"{prefix}mlp.{gate}.weight" for gate in gates)).unpack())
    gated = (_load_gated(read, kernels, shape, f"{prefix}mlp.experts.{number}", packed=packed) for number in numbers)
    return Experts(
        experts,
        router=router,
        each=kernels.stack_experts(gated, experts.count) if read.offloaded is None else read.offloaded.add_layer(gated),
        shared=None,
        correction=read.wide(prefix + correction) if correction else None,
    )


def run_feed(kernels: Kernels, feed: Feed, x: Tensor, batch: Batch) -> Tensor:
    if isinstance(feed, GatedWeights):
        return run_feed_forward(kernels, x, feed)
    return run_chosen_experts(kernels, feed, x, batch)


def run_chosen_experts(
    kernels: Kernels, feed: Experts | CpuExpertsLayer, x: Tensor, batch: Batch, deciding: Tensor | None = None
) -> Tensor:
    """Run x `[R, D]` through the experts that its router chooses. deciding: what the router reads in place of x."""
    if isinstance(feed, CpuExpertsLayer):
        kernels.stop_recording()
        return feed.run(kernels, x, batch, deciding, out=torch.empty_like(x))
    return kernels.experts(x, feed, batch, deciding)


def cut_up(name: str, entry: StoredTensor, wanted: Container[str]) -> Mapping[str, StoredTensor]:
    """Cut a tensor of all experts into the tensors of each, by name.

    The tensor is `[E, 2 I, D]` with rows `gate | up`, or `[E, D, I]`. Other tensors are returned as they are. So are
    tensors whose parts are not in `wanted`, except for those of a prediction head, which is checked when it is read.
    """
    stack = _STACKED.fullmatch(name)
    shape = entry.shape
    if (
        not isinstance(entry, TensorEntry)
        or stack is None
        or len(shape) != 3
        or not 1 <= shape[0] <= LIMITS["num_experts"]
    ):
        return {name: entry}
    parts = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
    known = stack[1].startswith("mtp.layers.0.") or f"{stack[1]}0.{parts[0]}.weight" in wanted
    if shape[1] % len(parts) or not known:
        return {name: entry}
    height = shape[1] // len(parts)
    return {
        f"{stack[1]}{number}.{part}.weight": entry.slice_rows(number * shape[1] + part_index * height, height)
        for number in range(shape[0])
        for part_index, part in enumerate(parts)
    }
