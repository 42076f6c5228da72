"""Decoding and prefill with the experts of some layers on the CPU (`--cpu-experts`). Random weights, all experts alike.

    python -m benchmarks.cpu_experts [--shape 30b-a3b|small] [--device cuda|cpu] [--layers 24] [--counts 0,12,24]
        [--packing none|q4_k|q8_0] [--threads 0]

--layers: of the model; times are given for these, and scaled to all layers of the shape. --counts: of first layers
whose experts the host computes. --packing: of these experts; the device has them in the model's dtype. Decoding is one
row a step over 256 rows of context, tokens all alike; prefill a chunk of 256. That rows have the same bits alone and in
a chunk is checked for every count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.expert_products import list_expert_matrices, list_expert_products
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights, random_matrix
from benchmarks.arguments import benchmark_parser
from benchmarks.host_experts import SHAPES, Runs, Setting, draw_tokens, kernels_for
from benchmarks.results import Figure, name_shape, publish
from benchmarks.tables import median, print_table
from engine.loading.calibration.expert_prices import count_expert_bytes, measure_copy, measure_crossing

CHUNK = 256
BUCKETS = (4, 16, CHUNK)
LAYOUTS = {
    "none": None,
    "q4_k": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "q8_0": StepLayout("int8", 32),
}
HOST = torch.device("cpu")


@frozen
class AlikeExperts:
    """Random weights in which all experts have the same numbers, so that they are drawn once."""

    own: RandomWeights
    layout: StepLayout | None
    known: dict[str, Any] = field(factory=dict)

    def read(self, name: str) -> Tensor:
        key = kind_of(name)
        if key == name:
            return self.own.read(name)
        if key not in self.known:
            self.known[key] = self.own.read(name)
        return self.known[key]

    def find_layout(self, name: str) -> StepLayout | None:
        return self.layout if kind_of(name) != name else None

    def read_packed(self, name: str) -> PackedMatrix:
        key = f"packed {kind_of(name)}"
        assert self.layout is not None
        if key not in self.known:
            shape = self.own.config.tensors()[name]
            self.known[key] = random_matrix(shape, self.layout, key, HOST, self.own.scale)
        return self.known[key]


def kind_of(name: str) -> str:
    """Return the part of an expert that a tensor is, or its name if it is of no expert."""
    return name.rsplit(".", 2)[1] if ".mlp.experts." in name else name


def device_kernels(setting: Setting) -> Kernels:
    """Return the kernels of the device. A CPU that stands for one multiplies in another way than the host: oneDNN's."""
    if setting.device.type == "cuda":
        return kernels_for(setting, setting.device)
    how = {"capacity": setting.capacity, "dtype": setting.dtype, "threads": torch.get_num_threads()}
    kernels = CpuKernels(setting.dtype, own=False)
    return kernels.with_plan(kernels.prove(setting.config.products(BUCKETS, **how)).plan)


def build(setting: Setting, count: int, layout: StepLayout | None) -> DenseShard:
    config = setting.config
    scale = config.hidden_size**-0.5
    how = {"dtype": setting.dtype, "slots": 4, "capacity": setting.capacity, "buckets": BUCKETS}
    placement = ShardPlacement(device=setting.device, **how)
    weights = AlikeExperts(RandomWeights(config, device=setting.device, dtype=setting.dtype, scale=scale), None)
    cpu_experts = None
    if count:
        layouts = (
            {}
            if layout is None
            else {name: layout for _, parts in list_expert_matrices(config, range(1)) for name, _ in parts}
        )
        kernels = CpuKernels(setting.dtype)
        listed = list_expert_products(
            evolve(config, num_layers=1), BUCKETS, threads=torch.get_num_threads(), layouts=layouts
        )
        began = time.perf_counter()
        plan = kernels.prove(listed).plan
        print(f"proven in {time.perf_counter() - began:.1f} s", flush=True)
        own = AlikeExperts(RandomWeights(config, dtype=setting.dtype, scale=scale), layout)
        cpu_experts = CpuExperts.prepare(range(count), kernels.with_plan(plan), own, config.hidden_size, placement)
    return DenseShard(config, weights, device_kernels(setting), placement, cpu_experts=cpu_experts)


def are_bits_equal(setting: Setting, shard: DenseShard) -> bool:
    """Return whether rows have the same logits alone, together with other rows, and in a chunk."""
    tokens = draw_tokens(setting, "all alike", 9)[: CHUNK + 16]

    def logits(bucket: int, *parts: tuple[int, int, int]) -> Tensor:
        step = Step(tuple(Segment(slot, start, count) for slot, start, count in parts), bucket)
        given = torch.cat([tokens[start : start + count] for _, start, count in parts])
        return shard.logits(step, shard.forward(step, given).hidden)[: step.rows].clone()

    whole = logits(CHUNK, (0, 0, CHUNK))
    logits(CHUNK, (1, 0, CHUNK - 16))
    alone = torch.cat([logits(4, (1, CHUNK - 16 + at, 1)) for at in range(4)])
    some = logits(16, (1, CHUNK - 12, 12))
    logits(CHUNK, (2, 0, CHUNK - 1))
    both = logits(4, (0, CHUNK - 1, 1), (2, CHUNK - 1, 1))
    expected = torch.cat((whole[-16:], whole[-1:], whole[-1:]))
    return torch.equal(torch.cat((alone, some, both)), expected)


def measure(setting: Setting, count: int, layout: StepLayout | None, whole: int) -> dict[str, Any]:
    began = time.perf_counter()
    shard = build(setting, count, layout)
    loaded = time.perf_counter() - began
    assert are_bits_equal(setting, shard), f"{count} layers: bits differ"
    runs = Runs(setting, shard)
    step = Step((Segment(0, 256, 1),), 4)
    tokens = draw_tokens(setting, "all alike", 1)
    hidden = shard.forward(step, tokens[:1]).hidden
    runs.decode(tokens, 8)
    heads = [time_head(shard, step, hidden) for _ in range(5)]
    times = [runs.decode(tokens, setting.steps) for _ in range(3)]
    chunks = [runs.prefill(tokens[at * 64 :]) for at in range(3)]
    layers = setting.config.num_layers
    scaled = [(one - min(heads)) * whole / layers + min(heads) for one in times]
    memory = shard.memory()
    shard.close()
    return {
        "layers on the CPU": f"{count} of {layers}",
        "decode, tokens/s": 1 / median(times),
        f"decode of {whole} layers, tokens/s": 1 / median(scaled),
        "prefill, rows/s": CHUNK / median(chunks),
        "host, GiB": memory["host"] / (1 << 30),
        "device, GiB": memory["weights"] / (1 << 30),
        "loaded, s": loaded,
    }


def time_head(shard: DenseShard, step: Step, hidden: Tensor) -> float:
    shard.synchronize()
    start = time.perf_counter()
    shard.logits(step, hidden)
    shard.synchronize()
    return time.perf_counter() - start


def make_figures(lines: list[Mapping[str, Any]], shape: str, packing: str, whole: int) -> list[Figure]:
    name = f"decode of {whole} layers, tokens/s"
    subject = f"{name_shape(shape)}, experts on the CPU in {packing}"
    return [Figure("decode", subject, one["layers on the CPU"], "tok/s", one[name]) for one in lines]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--counts", default="0,12,24")
    parser.add_argument("--packing", choices=LAYOUTS, default="q4_k")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    shape = SHAPES[given.shape]
    assert isinstance(shape, Qwen3MoeConfig)
    config = evolve(shape, num_layers=given.layers)
    setting = Setting(config, torch.device(given.device), torch.bfloat16, CHUNK, given.steps)
    row = torch.zeros(1, config.hidden_size, dtype=setting.dtype)
    crossing = measure_crossing(row, setting.device)
    copied = measure_copy(count_expert_bytes(config, setting.dtype), setting.device)
    print(f"a row there and back: {crossing / 1e3:.0f} us; an expert to the device: {copied / 1e3:.0f} us", flush=True)
    lines = list[dict[str, Any]]()
    with torch.inference_mode():
        for count in map(int, given.counts.split(",")):
            lines.append(measure(setting, count, LAYOUTS[given.packing], shape.num_layers))
            print(lines[-1], flush=True)
    print_table(f"{given.shape}, {given.layers} layers, {torch.get_num_threads()} threads, {given.packing}", lines)
    figures = make_figures(lines, given.shape, given.packing, shape.num_layers)
    found = {"shape": given.shape, "layers": given.layers, "crossing_ns": crossing, "copy_ns": copied, "found": lines}
    publish(given, f"cpu_experts-{given.packing}", found, figures, given.device)


if __name__ == "__main__":
    main()
