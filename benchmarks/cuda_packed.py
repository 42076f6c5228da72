"""Models of packed random weights on CUDA: decoding against the limit of its bytes, prefill against bf16.

    python -m benchmarks.cuda_packed [--record] [--shape 8b|30b-a3b] [--layers 36] [--chunk 2048]
        [--formats q4_k awq fp8 fp8_kept q8_0] [--rounds 9] [--only-prefill]

This measures what `benchmarks.cuda_model` does, for weights in bf16 and in each format. Q4_K has a head in
Q6_K, as files have it. AWQ and FP8 have a head in bf16, as folders have it. `fp8` rounds rows to FP8 as well,
`fp8_kept` keeps them. A token reads all weights but the embedding, with their scales, and keys and values; of experts,
only those that its row goes through. The limit is these bytes over the best bandwidth of the run. `fetched`: the host
fetches each token before the next step begins. `queued`: tokens stay on the device and steps are launched ahead, as a
server does. `benchmarks.packed_served` measures servers. `exact` says whether rows have the same bits at every bucket.
Prefill is the median of rounds of 8,192 tokens in chunks. All models are loaded then, and each round asks all of them,
because a device at its limit of power becomes slower as it gets warm. --only-prefill measures nothing else.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement, list_buckets
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.numerics.probe import buckets_of
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import EXPERTS
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import (
    DEVICE,
    DTYPE,
    VOCABULARY,
    bandwidth,
    buckets_are_exact,
    config_8b,
    decode,
    prefill,
    seconds,
    wide_steps,
)
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import median, print_table
from engine.loading.memory.packed_estimate import list_packed_tensors

HEAD = "lm_head.weight"
LAYERS: Mapping[str, StepLayout] = {
    "q4_k": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "q8_0": StepLayout("int8", 32),
    "awq": StepLayout("uint4", 128, least="scale"),
    "fp8": StepLayout("e4m3", 128, scale="float32", rounds_rows=True),
    "fp8_kept": StepLayout("e4m3", 128, scale="float32"),
}
HEADS: Mapping[str, StepLayout] = {"q4_k": StepLayout("int8", 16, per=16, inner=True), "q8_0": LAYERS["q8_0"]}
CONTEXT = 2048
LONG = 8192
WARMING = 2  # rounds of prefills that compile kernels and record graphs


def config_30b_a3b(layers: int, positions: int) -> DenseConfig:
    shape = ExpertsShape(128, 8, 768, is_normalized=True)
    return Qwen3MoeConfig(VOCABULARY, 2048, 6144, layers, 32, 4, 128, positions, 1e6, experts=shape)


SHAPES: Mapping[str, Callable[[int, int], DenseConfig]] = {
    "8b": config_8b,
    "30b-a3b": config_30b_a3b,
}


def laid_out(config: DenseConfig, name: str) -> dict[str, StepLayout]:
    if name not in LAYERS:
        return {}
    found = {one: LAYERS[name] for one in config.tensors() if one.endswith("_proj.weight")}
    return found | ({HEAD: HEADS[name]} if name in HEADS else {})


def count_idle_bytes(config: DenseConfig, layouts: Mapping[str, StepLayout]) -> int:
    """Return the bytes of the experts that a row does not go through."""
    if config.experts is None:
        return 0
    shapes = {name: shape for name, shape in config.tensors().items() if EXPERTS in name and len(shape) == 2}
    kept = list_packed_tensors(shapes, layouts, DTYPE)
    whole = sum(kept.get(name, math.prod(shape) * DTYPE.itemsize) for name, shape in shapes.items())
    return whole - whole * config.experts.chosen // config.experts.count


@frozen
class MeasuredModel:
    """A model of one format. bytes: that a token behind CONTEXT tokens reads."""

    shard: DenseShard
    buckets: tuple[int, ...]
    bytes: int


def load_model(name: str, args: argparse.Namespace) -> MeasuredModel:
    buckets = buckets_of(list_buckets(DEVICE), args.chunk)
    config = SHAPES[args.shape](args.layers, LONG + 1024)
    layouts = laid_out(config, name)
    weights = RandomWeights(config, 0, DEVICE, DTYPE, layouts=layouts)
    how: dict[str, Any] = {"slots": 1, "capacity": config.max_positions, "buckets": buckets}
    shard = DenseShard(config, weights, TritonKernels(DEVICE), ShardPlacement(device=DEVICE, dtype=DTYPE, **how))
    idle = count_idle_bytes(config, layouts) + config.vocab_size * config.hidden_size * DTYPE.itemsize
    size = shard.memory()["weights"] - idle + CONTEXT * config.kv_bytes_per_token(DTYPE)
    return MeasuredModel(shard, buckets, size)


def measure_prefills(models: Mapping[str, MeasuredModel], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each round, of each model. Rounds begin with the first and the last model in turn."""
    tokens = torch.randint(0, VOCABULARY, (LONG,), device=DEVICE)
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-WARMING, args.rounds):
        for name in list(models)[:: -1 if number % 2 else 1]:
            took = seconds(partial(prefill, models[name].shard, tokens, args.chunk))
            if number >= 0:
                found[name].append(took)
    return found


def measure_steps(model: MeasuredModel, speed: float) -> dict[str, Any]:
    """Measure steps of few rows. speed: bytes a second of the device."""
    shard = model.shard
    each = min(decode(shard, CONTEXT, 60, fetch=True) for _ in range(3))
    queued = min(decode(shard, CONTEXT, 60, fetch=False) for _ in range(3))
    return {
        "decode": each,
        "queued": queued,
        "share": model.bytes / speed / each,
        "queued share": model.bytes / speed / queued,
        "wide": wide_steps(shard, CONTEXT, (16, 32, 64, 128, 256)),
        "exact": buckets_are_exact(shard, model.buckets),
    }


def make_row(name: str, found: Mapping[str, Any], plain: float) -> dict[str, Any]:
    """plain: seconds of a prefill in bf16."""
    took = median(found["prefills"])
    row = {"weights": name, "GB a token": found["bytes"] / 1e9, "prefill s": took, "of bf16's speed": plain / took}
    if "decode" in found:
        row |= {"ms fetched": found["decode"] * 1e3, "ms queued": found["queued"] * 1e3}
        row |= {"fetched, of the limit": found["share"], "queued, of the limit": found["queued share"]}
        row |= {"exact": found["exact"]}
        row |= {f"ms, {bucket} rows": step * 1e3 for bucket, step in found["wide"].items()}
    return row


def make_figures(rows: list[dict[str, Any]], shape: str) -> list[Figure]:
    """Return the figures of prefill. `benchmarks.packed_served` has those of decoding."""
    subject = f"{name_shape(shape)}, prefill, of bf16's speed"
    packed = [row for row in rows if row["weights"] != "bf16"]
    goal = Goal(at_least=95)
    return [Figure("packed", subject, row["weights"], "%", 100 * row["of bf16's speed"], goal=goal) for row in packed]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--rounds", type=int, default=9, help="of prefills")
    parser.add_argument("--only-prefill", action="store_true", help="measure no steps of few rows")
    args = parser.parse_args()
    speeds = bandwidth()
    torch.cuda.empty_cache()
    models = {name: load_model(name, args) for name in ("bf16", *args.formats)}
    prefills = measure_prefills(models, args)
    found = dict[str, dict[str, Any]]()
    for name, model in models.items():
        found[name] = {"bytes": model.bytes, "prefills": prefills[name]}
        if not args.only_prefill:
            found[name] |= measure_steps(model, max(speeds.values()))
        model.shard.close()
    plain = median(prefills["bf16"])
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {max(speeds.values()) / 1e12:.2f} TB/s"
    rows = [make_row(name, one, plain) for name, one in found.items()]
    print_table(title, rows)
    publish(args, "cuda_packed", {"bandwidth": speeds} | found, make_figures(rows, args.shape))


if __name__ == "__main__":
    main()
