"""Measures the parts of a prompt's chunk on a GPU: each kernel's time, what it computes in a second, and its bits.

    python -m benchmarks.prefill_kernels [--record] [--rows 1024]

Attention and products run as they serve on this device, and as on a GPU without kernels of its own (`plain`). Both must
give the same bits. Products are compared with torch's as well, which are a library's. Weights lie in several copies, so
that they come from memory and not from the cache.

Launches are recorded in a graph, as a server's are, because the host needs longer to launch a small product than the
GPU to compute it. A graph is replayed for a while before it is timed, so that the GPU is as fast as its power limit
allows in a long prompt. Times are medians of events around replays.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE
from benchmarks.results import publish
from effects.ids import PAGE

CACHED = 150 << 20  # bytes: three times the L2 of an H200
RECORDED = 10  # launches of a graph
WARM_MS = 100.0  # the first launches run at a clock that the power limit does not allow for long


@frozen
class ChunkShape:
    """A model's products (name: columns, depth, whether gated), and its heads, key heads and head size."""

    products: dict[str, tuple[int, int, bool]]
    heads: tuple[int, int, int]


SHAPES = {
    "8B": ChunkShape(
        {
            "qkv": (6144, 4096, False),
            "o": (4096, 4096, False),
            "gate and up": (24576, 4096, True),
            "down": (4096, 12288, False),
        },
        (32, 8, 128),
    ),
    "27B hybrid": ChunkShape(
        {"in": (16384, 5120, False), "gate and up": (34816, 5120, True), "down": (5120, 17408, False)}, (24, 4, 256)
    ),
}
BEHIND = (0, 7168, 31744)  # rows that attention finds in the cache


def measure_us(run: Callable[[], object], times: int = 5) -> float:
    """Return the microseconds of one launch, while such launches have kept the GPU busy for WARM_MS."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RECORDED):
            run()

    def replay_ms(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    count = max(1, round(WARM_MS / replay_ms(1)))
    replay_ms(count)
    share = max(1, count // times)
    return statistics.median(1000 * replay_ms(share) / RECORDED for _ in range(times))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def make_kernels() -> dict[str, TritonKernels]:
    """Return the kernels that serve here, and those of any other GPU."""
    kernels = {"serving": TritonKernels(DEVICE), "plain": TritonKernels(DEVICE)}
    kernels["plain"].products.hopper = False
    kernels["plain"]._attention.hopper = False  # noqa: SLF001 - no option says this
    return kernels


def describe(outs: dict[str, Tensor], times: dict[str, float], operations: float) -> dict[str, Any]:
    """Return whether results have the bits of the kernel that serves, the us of each, and its TFLOP/s."""
    return {
        "same bits": {name: same_bits(out, outs["serving"]) for name, out in outs.items() if name != "serving"},
        "us": {name: round(took, 1) for name, took in times.items()},
        "TFLOP/s": {name: round(operations / took / 1e6, 1) for name, took in times.items()},
    }


def measure_product(rows: int, columns: int, depth: int, gated: bool) -> dict[str, Any]:
    every = make_kernels()
    count = 1 + CACHED // (columns * depth * DTYPE.itemsize)
    weights = [torch.randn(columns, depth, device=DEVICE).mul_(depth**-0.5).to(DTYPE) for _ in range(count)]
    x = torch.randn(rows, depth, device=DEVICE).to(DTYPE)
    own = every["serving"]
    packed = [own.pack_gated(weight) if gated else own.pack(weight) for weight in weights]

    def took(multiply: Callable[[Any], object], operands: list[Any]) -> float:
        following = cycle(operands)
        return measure_us(lambda: multiply(next(following)))

    outs = {name: kernels.linear(x, packed[0]) for name, kernels in every.items()}
    if not gated:
        outs["torch"] = x @ weights[0].T
    times = {name: took(lambda weight, one=kernels: one.linear(x, weight), packed) for name, kernels in every.items()}
    times["torch"] = took(lambda weight: x @ weight.T, weights)
    return describe(outs, times, 2 * rows * columns * depth)


def measure_attention(rows: int, behind: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    count, kv, size = heads
    pages = -(-(behind + rows) // PAGE)
    table = torch.randperm(pages, device=DEVICE).to(torch.int32).view(1, -1)
    k_cache, v_cache = (torch.randn(pages, kv, PAGE, size, device=DEVICE).to(DTYPE) for _ in range(2))
    q = torch.randn(rows, count, size, device=DEVICE).to(DTYPE)
    outs, times = {}, {}
    for name, kernels in make_kernels().items():
        batch = Batch(rows, DEVICE, pages=table)
        batch.load(Step((Segment(0, behind, rows),), rows), [0] * rows)
        kernels.prepare_step(batch)

        def attend(kernels: TritonKernels = kernels, batch: Batch = batch) -> Tensor:
            return kernels.attend(q, k_cache, v_cache, batch)

        outs[name] = attend()
        times[name] = measure_us(attend)
    return describe(outs, times, 4 * count * size * rows * (behind + (rows + 1) / 2))


def measure_rows(rows: int, heads: tuple[int, int, int], width: int) -> dict[str, float]:
    """Measure what is computed for each row alone, in us: norms, and rotation with the write to the cache."""
    kernels = TritonKernels(DEVICE)
    count, kv, size = heads
    residual, delta = (torch.randn(rows, width, device=DEVICE).to(DTYPE) for _ in range(2))
    weight = torch.ones(width, device=DEVICE, dtype=DTYPE)
    pages = -(-rows // PAGE)
    k_cache, v_cache = (torch.zeros(pages, kv, PAGE, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    batch = Batch(rows, DEVICE, pages=torch.arange(pages, dtype=torch.int32, device=DEVICE).view(1, -1))
    batch.load(Step((Segment(0, 0, rows),), rows), [0] * rows)
    angles = torch.rand(pages * PAGE, size // 2, device=DEVICE)
    norm = torch.ones(size, device=DEVICE, dtype=DTYPE)
    prep, rope = HeadPrep(q_norm=norm, k_norm=norm, eps=1e-6), Rope(angles.cos(), angles.sin())
    qkv = torch.randn(rows, (count + 2 * kv) * size, device=DEVICE).to(DTYPE)
    return {
        "norm us": round(measure_us(lambda: kernels.add_norm(residual, delta, weight, 1e-6)), 1),
        "rotate us": round(measure_us(lambda: kernels.rotate_store(qkv, prep, rope, batch, k_cache, v_cache)), 1),
    }


def measure(given: Namespace) -> dict[str, Any]:
    rows = given.rows
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": rows}
    for name, shape in SHAPES.items():
        width = next(depth for _, depth, gated in shape.products.values() if gated)
        found[name] = {
            **{product: measure_product(rows, *sizes) for product, sizes in shape.products.items()},
            **{f"attention behind {behind}": measure_attention(rows, behind, shape.heads) for behind in BEHIND},
            "rows": measure_rows(rows, shape.heads, width),
        }
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="of a chunk, a bucket of the model")
    given = parser.parse_args()
    found = measure(given)
    publish(given, "prefill_kernels", found)
    for name in SHAPES:
        for part, figures in found[name].items():
            print(f"{name:12s} {part:24s}", figures)


if __name__ == "__main__":
    main()
