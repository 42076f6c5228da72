"""The products and the tensors of experts, for a host that computes the experts of a device's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.config.dense_config import packed_parts
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.feed_forward import Matrix
from adapters.models.kernels.interfaces.product_list import Products, Weight

EXPERTS = ".mlp.experts."
_ROUTERS = (EXPERTS, ".mlp.gate.", ".mlp.shared_expert_gate.")  # with what is added to the router's results
_FEW_ROWS = (1, 2)  # rows of an expert in a decode step, besides the buckets


def list_expert_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers that have experts."""
    if config.experts is None:
        return ()
    layers = range(config.num_layers)
    return tuple(layer for layer in layers if any(EXPERTS in name for name in config.tensors(range(layer, layer + 1))))


def list_host_tensors(config: ModelConfig, layers: range) -> list[str]:
    """Return the names of the tensors that the host has where it computes the experts of these layers: those of experts
    and routers. A shared expert stays on the device.
    """
    if not layers:
        return []
    return [name for name in config.tensors(layers) if any(part in name for part in _ROUTERS)]


def list_expert_matrices(config: ModelConfig, layers: range | None = None) -> Iterator[Matrix]:
    """Yield every weight of the experts of these layers, or of all."""
    return (matrix for matrix in config.matrices(layers) if EXPERTS in matrix[1][0][0])


def list_expert_products(
    config: ModelConfig, buckets: Sequence[int], *, threads: int, layouts: Mapping[str, StepLayout] = {}
) -> Products:
    """Return all products by which the host computes experts in steps of these buckets.

    Weights stay as they are stored, 16 bits wide or packed: most time goes into reading them.
    """
    assert config.experts is not None
    matrices = list(list_expert_matrices(config))
    parts = [part for matrix in matrices for part in packed_parts(*matrix, layouts)] if layouts else []
    # The layers that the probe runs have a router for fewer experts.
    routers = [shape.router_outputs for shape in (config.experts, config.experts.shrink_for_probe())]
    weights = [*(Weight(outputs, config.hidden_size) for outputs in routers), *(weight for weight, _ in matrices)]
    return Products(
        weights=tuple(dict.fromkeys([*weights, *(part for part in parts if part.layout is None)])),
        packed=tuple(dict.fromkeys(part for part in parts if part.layout is not None)),
        unpacked=False,
        wider=False,
        heads=(),
        rows=tuple(sorted({*_FEW_ROWS, *buckets})),
        threads=(threads, threads),
    )
