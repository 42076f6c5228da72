"""Layers of experts of published shapes against the bytes that they must read: a few rows, and chunks. On CUDA.

    python -m benchmarks.expert_kernels [--record] [--shape 30b-a3b] [--formats bf16 q4_k ...] [--rows 1 ...]

Random weights and rows. Each figure is the replay of a graph over some layers, which together do not fit into the
cache, divided by their number. `products us` are the two grouped products alone. before: each expert two launches of
its own, for which the host waits. Bytes: the weights of the experts that some row goes through, each once, as they are
kept.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.checkpoint.packed_matrix import MXFP4, StackedWeight, StepLayout
from adapters.models.kernels.activations import CLAMPED, SILU
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    ExpertsShape,
    GatedWeights,
    StackedExperts,
    choose_experts,
)
from adapters.models.kernels.offload import count_bytes
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.synthetic import random_matrix
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth
from benchmarks.hybrid_kernels import replay_us
from benchmarks.results import publish
from benchmarks.tables import print_table

SHAPES: Mapping[str, tuple[int, ExpertsShape]] = {
    "30b-a3b": (2048, ExpertsShape(128, 8, 768, is_normalized=True)),
    "26b-a4b": (2816, ExpertsShape(128, 8, 704, is_normalized=True)),
    "gpt-oss-20b": (2880, BiasedExpertsShape(32, 4, 2880, is_normalized=True)),
}
FORMATS: Mapping[str, StepLayout | None] = {
    "bf16": None,
    "q4_k": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "q6_k": StepLayout("int8", 16, per=16, inner=True),
    "q8_0": StepLayout("int8", 32),
    "awq": StepLayout("uint4", 128, least="scale"),
    "fp8": StepLayout("e4m3", 128, scale="float32"),
    "mxfp4": MXFP4,
}
ROWS = (1, 4, 8, 16, 32, 128, 256, 512, 1024, 2048)
ACTIVE = 160_000_000  # bytes that one row reads of all layers together, more than caches hold twice
DISTINCT = 8  # experts of a layer that are drawn; the others are copies


@frozen
class FormedExperts:
    """A shape of experts in a format."""

    hidden: int
    shape: ExpertsShape
    layout: StepLayout | None

    @property
    def weights(self) -> int:
        """Return the number of weights of an expert."""
        return 3 * self.shape.inner * self.hidden


def make_layer(kernels: TritonKernels, formed: FormedExperts, seed: int) -> Experts:
    hidden, shape, layout = formed.hidden, formed.shape, formed.layout
    biased = isinstance(shape, BiasedExpertsShape)

    def weight(name: str, *rows: int, columns: int) -> Any:
        if layout is None:
            return torch.empty(sum(rows), columns, device=DEVICE, dtype=DTYPE).normal_(0, columns**-0.5)
        parts = (
            random_matrix((one, columns), layout, f"{seed} {name} {part}", DEVICE) for part, one in enumerate(rows)
        )
        return StackedWeight(tuple(parts), DTYPE, DEVICE)

    def make_expert(number: int) -> GatedWeights:
        both = weight(f"{number} gate", shape.inner, shape.inner, columns=hidden)
        down = kernels.pack(weight(f"{number} down", hidden, columns=shape.inner))
        if not biased:
            return GatedWeights(kernels.pack_gated(both), down, SILU)
        biases = (torch.zeros(size, device=DEVICE, dtype=DTYPE) for size in (2 * shape.inner, hidden))
        return GatedWeights(kernels.pack(both), down, CLAMPED, *biases)

    router = torch.empty(shape.count, hidden, device=DEVICE, dtype=DTYPE).normal_(0, hidden**-0.5)
    drawn = list(map(make_expert, range(DISTINCT)))
    each = kernels.stack_experts(islice(cycle(drawn), shape.count), shape.count)
    correction = torch.zeros(shape.count, device=DEVICE) if biased else None
    return Experts(shape, kernels.pack(router), each, None, correction=correction)


def waited_us(run: Callable[[], object], count: int = 3) -> float:
    """Microseconds of something that waits for the device."""
    times = list[float]()
    for _ in range(count + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def stack_of(layer: Experts) -> StackedExperts:
    assert isinstance(layer.each, StackedExperts)
    return layer.each


def products_us(kernels: TritonKernels, layers: list[Experts], x: torch.Tensor, chosen: torch.Tensor) -> float:
    """Microseconds of the grouped products of a layer."""
    grouped, shape = kernels.grouped_experts, layers[0].shape
    pairs = chosen.numel()
    weights = stack_of(layers[0]).weights
    tiles = [grouped.choose_tile(one, pairs, shape.count) for one in (weights.gate_up, weights.down)]
    dealt = [grouped.deal_pairs(chosen, None, tile.pairs, shape.count) for tile in tiles]
    dealt[1] = evolve(dealt[1], is_early=True)
    gated = weights.activation == SILU
    both = x.new_empty(pairs, shape.inner if gated else 2 * shape.inner)
    inner, out = x.new_empty(pairs, shape.inner), x.new_empty(pairs, x.shape[1])

    def multiply(layer: Experts) -> None:
        own = stack_of(layer).weights
        grouped.multiply_pairs(x, own.gate_up, both, dealt[0], tiles[0], share=shape.chosen)
        grouped.multiply_pairs(both if gated else inner, own.down, out, dealt[1], tiles[1])

    return replay_us(layers, multiply)


def measure(
    kernels: TritonKernels, layers: list[Experts], formed: FormedExperts, rows: int, speed: float
) -> dict[str, Any]:
    bucket, shape = max(4, rows), formed.shape
    batch, x = Batch(bucket, DEVICE), torch.randn(bucket, formed.hidden, device=DEVICE).to(DTYPE)
    batch.load(Step((Segment(0, 0, rows),), bucket), None)
    logits = kernels.linear(x, layers[0].router)[:rows].float()
    chosen = choose_experts(logits, shape)[0]
    active = len(chosen.unique())
    took = replay_us(layers, lambda one: kernels.experts(x, one, batch))
    products = products_us(kernels, layers, x[:rows].contiguous(), chosen.int().contiguous())
    stack = stack_of(layers[0])
    limit = 1e6 * active * count_bytes(stack.weights) / shape.count / speed
    plain = evolve(layers[0], each=[stack[number] for number in range(shape.count)])
    before = waited_us(lambda: kernels.experts(x, plain, batch)) if formed.layout is None else 0.0
    tile = kernels.grouped_experts.choose_tile(stack.weights.gate_up, chosen.numel(), shape.count)
    return {
        "rows": rows,
        "experts": active,
        "pairs of a tile": tile.pairs,
        "layer us": round(took, 1),
        "products us": round(products, 1),
        "limit us": round(limit, 1),
        "share": round(limit / products, 2),
        "TFLOP/s": round(2e-6 * rows * shape.chosen * formed.weights / products),
        "before us": round(before),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    given = parser.parse_args()
    speed = max(bandwidth().values())
    found = dict[str, list[dict[str, Any]]]()
    for name in given.formats:
        gc.collect()
        torch.cuda.empty_cache()
        kernels = TritonKernels(DEVICE)
        formed = FormedExperts(*SHAPES[given.shape], FORMATS[name])
        layers = [make_layer(kernels, formed, 0)]
        active = count_bytes(stack_of(layers[0]).weights) * formed.shape.chosen / formed.shape.count
        while len(layers) * active < ACTIVE:
            layers.append(make_layer(kernels, formed, len(layers)))
        found[name] = [measure(kernels, layers, formed, rows, speed) for rows in given.rows]
        print_table(f"{given.shape} in {name}; {speed / 1e12:.2f} TB/s", found[name])
    rows = found.pop("bf16", [])
    publish(given, "expert_kernels", {"bandwidth": speed, "rows": rows, **found})


if __name__ == "__main__":
    main()
