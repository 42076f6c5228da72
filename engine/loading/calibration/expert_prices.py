"""Measures what the experts of a layer cost a decoded row: computed on the host, or brought to the device.

Weights are random, in the sizes and formats of the model. There are so many experts that the processor's caches do not
hold them, and each row goes through others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StackedWeight, StepLayout
from adapters.models.decoder.cpu_experts import HostRows
from adapters.models.decoder.expert_products import list_expert_matrices
from adapters.models.decoder.family import ModelConfig
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
from adapters.models.kernels.interfaces.experts_interface import Experts, ExpertsShape, GatedWeights
from adapters.models.kernels.offload import allocate_pinned
from adapters.models.numerics.synthetic import random_matrix
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.memory.device_survey import build_expert_kernels
from states.experts import ExpertPrices

ROWS = 24  # decoded rows that are timed, each with other experts
CACHED = 256 << 20  # bytes of experts that no processor's caches hold
COPIED = 16  # experts that are brought one after the other


def measure_expert_prices(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ExpertPrices:
    """Measure both ways for the experts of this model, which takes about a second.

    The host computes all experts of a row in one layer, so `compute_ns` is the price of a row and a layer. Experts are
    brought to the device one by one, so `bring_ns` is the price of one expert.
    """
    config = checkpoint.config
    kernels = build_expert_kernels(dtype)
    with torch.inference_mode():
        layer = build_layer(checkpoint, kernels, dtype)
        drawn = torch.empty(ROWS, config.hidden_size).normal_(generator=make_generator(4)).to(dtype)
        computed = [time_call(partial(kernels.sum_experts, drawn[row : row + 1], layer, 1)) for row in range(ROWS)]
        crossing = measure_crossing(drawn[:1], device)
        return ExpertPrices(int(median(computed)) + crossing, measure_copy(count_expert_bytes(config, dtype), device))


def build_layer(checkpoint: Checkpoint, kernels: ExpertKernels, dtype: torch.dtype) -> Experts:
    """Return a layer of experts on the host, with a plain router. All have the same numbers, in memory of their own."""
    config = checkpoint.config
    assert config.experts is not None
    matrices = list(islice(list_expert_matrices(config), 2))
    named = [(name, rows, weight.inputs) for weight, tensors in matrices for name, rows in tensors]
    gate, up, down = (draw_matrix(rows, inputs, checkpoint.layouts.get(name), dtype) for name, rows, inputs in named)
    host = torch.device("cpu")

    def pack() -> GatedWeights:
        both = kernels.pack_gated(StackedWeight((gate, up), dtype, host))
        return GatedWeights(both, kernels.pack(StackedWeight((down,), dtype, host)))

    few = CACHED // count_expert_bytes(config, dtype) + config.experts.chosen
    shape = ExpertsShape(
        min(config.experts.count, few), config.experts.chosen, config.experts.inner, is_normalized=True
    )
    router = draw_matrix(shape.count, config.hidden_size, None, dtype)
    assert isinstance(router, Tensor)
    stacked_experts = kernels.stack_experts((pack() for _ in range(shape.count)), shape.count)
    return Experts(shape, kernels.pack(router), stacked_experts, None)


def draw_matrix(rows: int, columns: int, layout: StepLayout | None, dtype: torch.dtype) -> Tensor | PackedMatrix:
    """Return random weights as the checkpoint packs them; layout None: not at all."""
    scale = columns**-0.5
    if layout is not None and layout.fits(columns):
        return random_matrix((rows, columns), layout, "price", torch.device("cpu"), scale)
    return torch.empty(rows, columns).normal_(std=scale, generator=make_generator(5)).to(dtype)


def count_expert_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one expert on the device."""
    assert config.experts is not None
    return 3 * config.experts.inner * config.hidden_size * dtype.itemsize


def measure_crossing(row: Tensor, device: torch.device) -> int:
    """Return the nanoseconds in which a row goes to the host and its sums come back."""
    rows = HostRows.allocate(1, row.shape[1], row.dtype, device)
    there = row.to(device)

    def cross() -> None:
        rows.send(there, None)
        given, _ = rows.receive(1, decides=False)
        there.copy_(rows.stage(rows.rounded, given, 1), non_blocking=True)
        wait_for(device)

    return int(median(time_call(cross) for _ in range(ROWS)))


def measure_copy(size: int, device: torch.device) -> int:
    """Return the nanoseconds in which an expert's weights are copied to the device, behind others."""
    source = allocate_pinned(size)
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        for _ in range(COPIED):
            target.copy_(source, non_blocking=True)
        wait_for(device)

    return min(time_call(copy) for _ in range(3)) // COPIED


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(work: Callable[[], object]) -> int:
    """Return the nanoseconds of a call."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start
