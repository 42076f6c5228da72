"""A layer of experts of Qwen3-30B-A3B's shape against the bytes it must read: a few rows, and chunks. On CUDA.

    python -m benchmarks.expert_kernels [--record]

Random weights and rows in bfloat16. Each figure is the replay of a graph over four layers, which together do not fit
into the cache, divided by their number; before: each expert two launches of its own, for which the host waits. Bytes:
the weights of the experts that some row goes through, each once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from adapters.models.kernels.cuda.experts import choose_group_tile
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.tiles import H200_SHARED
from adapters.models.kernels.experts_interface import (
    Experts,
    ExpertsShape,
    GatedWeights,
    StackedExperts,
    choose_experts,
)
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth
from benchmarks.hybrid_kernels import replay_us
from benchmarks.results import publish
from benchmarks.tables import print_table

HIDDEN, SHAPE, LAYERS = 2048, ExpertsShape(128, 8, 768, is_normalized=True), 4
ROWS = (1, 4, 8, 16, 32, 128, 256, 512, 1024, 2048)
EXPERT = 3 * SHAPE.inner * HIDDEN  # weights


def layer(kernels: TritonKernels) -> Experts:
    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return torch.empty(outputs, inputs, device=DEVICE, dtype=DTYPE).normal_(0, inputs**-0.5)

    each = (
        GatedWeights(kernels.pack_gated(weight(2 * SHAPE.inner, HIDDEN)), kernels.pack(weight(HIDDEN, SHAPE.inner)))
        for _ in range(SHAPE.count)
    )
    return Experts(SHAPE, kernels.pack(weight(SHAPE.count, HIDDEN)), kernels.stack_experts(each, SHAPE.count), None)


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


def figure(kernels: TritonKernels, layers: list[Experts], rows: int, speed: float) -> dict[str, Any]:
    bucket = max(4, rows)
    batch, x = Batch(bucket, DEVICE), torch.randn(bucket, HIDDEN, device=DEVICE).to(DTYPE)
    batch.load(Step((Segment(0, 0, rows),), bucket), None)
    logits = kernels.linear(x, layers[0].router)[:rows].float()
    active = len(choose_experts(logits, SHAPE)[0].unique())
    took = replay_us(layers, lambda one: kernels.experts(x, one, batch))
    stack = layers[0].each
    assert isinstance(stack, StackedExperts)
    plain = evolve(layers[0], each=[stack[number] for number in range(SHAPE.count)])
    limit = 1e6 * active * EXPERT * DTYPE.itemsize / speed
    before = waited_us(lambda: kernels.experts(x, plain, batch))
    return {
        "rows": rows,
        "experts": active,
        "tile": "x".join(map(str, choose_group_tile(bucket * SHAPE.chosen, SHAPE.count, DTYPE, H200_SHARED).shape)),
        "us": round(took, 1),
        "limit us": round(limit, 1),
        "share": round(limit / took, 2),
        "TFLOP/s": round(2e-6 * rows * SHAPE.chosen * EXPERT / took),
        "before us": round(before),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    given = parser.parse_args()
    speed = max(bandwidth().values())
    torch.cuda.empty_cache()
    kernels = TritonKernels(DEVICE)
    layers = [layer(kernels) for _ in range(LAYERS)]
    found = [figure(kernels, layers, rows, speed) for rows in ROWS]
    print_table(f"{SHAPE.count} experts, {SHAPE.chosen} of them a row's; {speed / 1e12:.2f} TB/s", found)
    publish(given, "expert_kernels", {"bandwidth": speed, "rows": found})


if __name__ == "__main__":
    main()
