"""Time single products of a few rows with packed weights on CUDA, tile by tile, beside the limit of their bytes.

    python -m benchmarks.packed_kernels [--formats q4_k ...] [--rows 1 ...] [--tiles served 8x16x2+128 ...]
        [--shapes qkv ...] [--check]

The figures are microseconds a product, of one recorded graph of many, over weights in turn that are more than caches
hold. The shapes are those of an 8B layer. A tile has rows of x, rows of the weight and blocks loaded ahead, as
`PackedTile` has them, and `+128` for at most 128 registers; `served` is what serves, and `registers` what serves where
weights do not come ahead through shared memory. --check instead compares the bits of each tile with those of wide
products of unpacked weights.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight, StepLayout
from adapters.models.kernels.cuda.kernels import CudaWeight, TritonKernels
from adapters.models.kernels.cuda.packed import CudaPackedMatrix, CudaStack
from adapters.models.kernels.cuda.packed_ahead import comes_ahead, multiply_ahead
from adapters.models.kernels.cuda.packing.few_rows import PackedTile, choose_packed_tile, multiply_narrow
from adapters.models.numerics.synthetic import random_matrix
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth, seconds
from benchmarks.results import publish
from benchmarks.tables import print_table

FORMATS: Mapping[str, StepLayout] = {
    "q4_k": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "q6_k": StepLayout("int8", 16, per=16, inner=True),
    "q8_0": StepLayout("int8", 32),
    "iq4_xs": StepLayout("iq4", 32, per=8, inner=True),
    "awq": StepLayout("uint4", 128, least="scale"),
    "fp8": StepLayout("e4m3", 128, scale="float32"),
}
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
GATED = "gate_up"
CACHES = 160_000_000  # bytes, more than they hold twice
PRODUCTS = 200  # of a graph, about


def tile_of(name: str, count: int, weight: CudaPackedMatrix) -> PackedTile:
    device = triton.runtime.driver.active.utils.get_device_properties(0)
    served = choose_packed_tile(count, weight, device["multiprocessor_count"], device["max_shared_mem"])
    if name in {"served", "registers"}:
        return served
    sizes, _, registers = name.partition("+")
    rows, columns, ahead = map(int, sizes.split("x"))
    return PackedTile(rows, columns, ahead, served.warps, int(registers) if registers else None)


def multiply(
    kernels: TritonKernels, name: str, x: Tensor, weight: CudaPackedMatrix, out: Tensor, *, gated: bool
) -> None:
    """Multiply with the tile of this name."""
    if name == "served" and kernels.traits.capability.has_hopper_kernels and comes_ahead(len(x), weight, x.dtype):
        multiply_ahead(x, weight, out, gated=gated, pdl=kernels.pdl)
    else:
        multiply_narrow(x, weight, out, tile_of(name, len(x), weight), gated=gated, pdl=kernels.pdl)


def kernels_of() -> TritonKernels:
    kernels = TritonKernels(DEVICE)
    kernels.graphs.enabled = False
    return kernels


def matrices(name: str, outputs: int, columns: int, *, gated: bool) -> StackedWeight:
    share = 1 + gated
    shape = (outputs // share, columns)
    return StackedWeight(
        tuple(random_matrix(shape, FORMATS[name], part, DEVICE) for part in "ab"[:share]), DTYPE, DEVICE
    )


def pack_stack(kernels: TritonKernels, stack: StackedWeight, *, gated: bool) -> CudaPackedMatrix:
    weight = kernels.pack_gated(stack) if gated else kernels.pack(stack)
    assert isinstance(weight, CudaStack)
    (part,) = weight.parts
    assert isinstance(part, CudaPackedMatrix)
    return part


def differing(name: str, tiles: list[str]) -> list[dict[str, Any]]:
    """Of each tile how many numbers have other bits, of how many."""
    kernels, wrong, total = kernels_of(), Counter[str](), 0
    for columns, gated in itertools.product((1280, 4096), (False, True)):
        stack = matrices(name, 832, columns, gated=gated)
        weight, plain = pack_stack(kernels, stack, gated=gated), stack.unpack()
        x = torch.randn(256, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(DTYPE)
        unpacked = kernels.pack_gated(plain) if gated else kernels.pack(plain)
        assert isinstance(unpacked, CudaWeight)
        wide = x.new_empty(len(x), weight.outputs // (1 + gated))
        piece = weight.piece if weight.pieces > 1 else 0
        kernels.products.multiply(x, unpacked.weight, wide, gated=gated, piece=piece)
        for count in (1, 4, 16, 32, 50):
            expected = wide[7 : 7 + count]
            total += expected.numel()
            for tile in tiles:
                out = torch.full_like(expected, float("nan"))
                multiply(kernels, tile, x[7:][:count], weight, out, gated=gated)
                wrong[tile] += int((out.view(torch.int16) != expected.view(torch.int16)).sum())
    return [{"format": name, "tile": tile, "differing": wrong[tile], "of": total} for tile in tiles]


def copies(weight: CudaPackedMatrix) -> list[CudaPackedMatrix]:
    made = [weight]
    while len(made) < max(2, CACHES / size_of(weight)):
        made.append(copy.deepcopy(weight))
    return made


def size_of(weight: CudaPackedMatrix) -> int:
    return sum({one.data_ptr(): one.nbytes for one in weight.tensors}.values())


def seconds_each(bodies: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Of each: the best of some replays of one graph of them all, many times over."""
    times = max(1, PRODUCTS // len(bodies))
    bodies[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for body in bodies * times:
            body()
    return min(seconds(graph.replay) for _ in range(repeats)) / times / len(bodies)


def measure_tiles(
    name: str, counts: list[int], tiles: list[str], shapes: list[str], speed: float
) -> list[dict[str, Any]]:
    kernels = kernels_of()
    found: dict[tuple[int, str], dict[str, Any]] = {
        (count, tile): {"format": name, "rows": count, "tile": tile}
        for count in counts
        for tile in ("bytes' limit", *tiles)
    }
    for shape in shapes:
        outputs, columns = SHAPES[shape]
        gated = shape == GATED
        weights = copies(pack_stack(kernels, matrices(name, outputs, columns, gated=gated), gated=gated))
        for (count, label), row in found.items():
            if label == "bytes' limit":
                row[shape] = size_of(weights[0]) / speed * 1e6
                continue
            x = torch.randn(count, columns, device=DEVICE).to(DTYPE)
            out = x.new_empty(count, outputs // (1 + gated))
            bodies: list[Callable[[], Any]] = [
                partial(multiply, kernels, label, x, one, out, gated=gated) for one in weights
            ]
            row[shape] = seconds_each(bodies) * 1e6
    return [row | {"layer": sum(row[shape] for shape in shapes)} for row in found.values()]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["q4_k", "fp8", "awq", "q8_0"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tiles", nargs="+", default=["served"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        print_table("bits", [row for name in args.formats for row in differing(name, args.tiles)])
        return
    speed = max(bandwidth().values())
    rows = [row for name in args.formats for row in measure_tiles(name, args.rows, args.tiles, args.shapes, speed)]
    print_table(f"{torch.cuda.get_device_name()}, {speed / 1e12:.2f} TB/s, microseconds a product", rows)
    publish(args, "packed_kernels", {"rows": rows})


if __name__ == "__main__":
    main()
