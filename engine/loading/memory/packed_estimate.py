"""Estimates the memory of weights that stay packed in products, on a CPU and on a GPU."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.config.dense_config import packed_parts
from adapters.models.decoder.expert_products import list_expert_matrices
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.feed_forward import Matrix
from adapters.models.kernels.factory import explain_missing_library
from adapters.models.kernels.formats.packed_formats import PANEL, count_device_bits, has_packed_kernel
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, Weight, is_unpacked
from adapters.models.open_checkpoint import EXPERTS, Checkpoint
from engine.loading.memory.device_survey import Placement, host_memory
from engine.settings.output.formatting import format_bytes

log = logging.getLogger("rekindle")
EMBEDDING = "model.embed_tokens.weight"


def list_host_products(config: ModelConfig, dtype: torch.dtype) -> Products:
    """Return the products of the model as a CPU would compute them."""
    return config.products((1,), capacity=1, dtype=dtype, threads=1, memory=host_memory() // 2)


def count_packed_products(
    config: ModelConfig,
    dtype: torch.dtype,
    layers: range,
    layouts: Mapping[str, StepLayout],
    proven: ProductPlan | None,
) -> tuple[int, int]:
    """Return how many weights a CPU keeps packed in products, and the bytes that those take, 32 outputs at a time."""
    listed = list_host_products(config, dtype)

    def stays(part: Weight) -> bool:
        if part.layout is None:
            return True
        if proven is None:
            return part.layout.fits(part.inputs) and keeps_packed(listed, dtype, part.layout)
        return proven.multiplies_packed(part.outputs, part.inputs, part.layout, gated=part.gated)

    return count_packed(config.matrices(layers), layouts, stays)


def estimate_cpu_experts(
    config: ModelConfig, dtype: torch.dtype, layers: range, layouts: Mapping[str, StepLayout]
) -> int:
    """Return the bytes that experts of these layers take of host memory if the host computes them."""
    has_library = not explain_missing_library()
    matrices = list(list_expert_matrices(config, layers)) if layers else []
    less, taken = count_packed(
        matrices,
        layouts,
        lambda part: part.layout is None or (has_library and part.layout.fits(part.inputs)),
    )
    numbers = sum(weight.outputs * weight.inputs * (2 if weight.gated else 1) for weight, _ in matrices)
    return (numbers - less) * dtype.itemsize + taken


def count_packed(
    matrices: Iterable[Matrix], layouts: Mapping[str, StepLayout], stays: Callable[[Weight], bool]
) -> tuple[int, int]:
    """Return how many weights stay packed, and the bytes that those take, 32 outputs at a time. stays: says of a part
    of a weight whether it does.
    """
    numbers = taken = 0
    for weight, tensors in matrices:
        parts = packed_parts(weight, tensors, layouts)
        matrix_count = 2 if weight.gated else 1
        if all(map(stays, parts)):
            for part in parts:
                if part.layout is not None:
                    numbers += matrix_count * part.outputs * part.inputs
                    taken += matrix_count * round(
                        -(-part.outputs // PANEL) * PANEL * part.inputs * part.layout.bits / 8
                    )
    return numbers, taken


def keeps_packed(products: Products, dtype: torch.dtype, layout: StepLayout) -> bool:
    """Return whether a CPU is expected to compute products from packed weights of this layout, as the prover decides.

    The proof says in the end, because the system may not let the process use the processor's tiles.
    """
    tiles = dtype == torch.bfloat16 and bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return not explain_missing_library() and not (tiles and is_unpacked(products, layout))


def leave_out_experts(layouts: Mapping[str, StepLayout]) -> dict[str, StepLayout]:
    """Return the layouts of all tensors but those of experts, which are unpacked for host memory."""
    return {name: layout for name, layout in layouts.items() if EXPERTS not in name}


def log_unpacked_weights(checkpoint: Checkpoint, dtype: torch.dtype, plan: Sequence[Placement]) -> None:
    """Say which packed formats GPUs unpack because they have no products for them, with their bytes then."""
    if all(placement.compute_device.type != "cuda" for placement in plan):
        return
    shapes = {name: shape for name, shape in checkpoint.config.tensors().items() if name != EMBEDDING}
    kept = list_packed_tensors(shapes, checkpoint.layouts, dtype)
    taken = Counter[str]()
    for name, shape in shapes.items():
        form = checkpoint.tensors[name].packing_name if name in checkpoint.tensors else ""
        if form and name not in kept:
            taken[form] += math.prod(shape) * dtype.itemsize
    if taken:
        found = ", ".join(f"{form} ({format_bytes(size)})" for form, size in taken.most_common())
        log.info("a GPU has no products for these packed weights, so they are unpacked: %s", found)


def list_packed_tensors(shapes: Shapes, layouts: Mapping[str, StepLayout], dtype: torch.dtype) -> dict[str, int]:
    """Return, by name, the bytes in GPU memory of the tensors that stay packed. Other tensors are unpacked to `dtype`.

    shapes: `[outputs, inputs]` by name, of single matrices: stacked experts and fused gates have been split before.
    layouts: of the packed tensors by name; their `bits` include scales. A gate stays packed only if the projection that
    it gates has the same layout.
    """
    found = dict[str, int]()
    for name, shape in shapes.items():
        layout = layouts.get(name)
        both = [name.replace("gate_proj", "up_proj"), name.replace("up_proj", "gate_proj")]
        alike = {layouts.get(pair_name) for pair_name in both} == {layout}
        if layout is not None and alike and has_packed_kernel(layout, shape[1], dtype):
            found[name] = math.ceil(math.prod(shape) * count_device_bits(layout) / 8)
    return found
