"""Products of our own against oneDNN's in one process, in turn: by weight and row count, and in steps of the demo.

    python -m benchmarks.native [--rounds 12] [--steps 25] [--dtype bfloat16]

Milliseconds of processor time on one thread for products, and on the threads that serve for steps: lower quartiles.
Ratios are oneDNN's time over ours. A step is of one row at the smallest bucket, logits included, or a chunk of prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.native_library import explain_missing, find_library
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.interfaces.product_list import NATIVE
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.arguments import benchmark_parser
from benchmarks.results import publish
from benchmarks.tables import print_table

DEMO, CPU = Path(__file__).parents[1] / "adapters" / "demo", torch.device("cpu")
ROWS, CHUNK, CONTEXT = (4, 16, 64, 256), 256, 8192
COPIES = 12  # of a weight, as many as there are layers or so: one alone would stay in the cache
CASES = (("decode", 500), ("decode", 2040), ("decode", 7800), ("chunk", 0), ("chunk", 2048), ("chunk", 7680))


def in_turn(rounds: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    return {name: sorted(found)[len(found) // 4] * 1e3 for name, found in times.items()}


def products(checkpoint: Checkpoint, own: NativeProducts, dtype: torch.dtype, rounds: int) -> list[dict[str, object]]:
    listed = checkpoint.config.products(ROWS, capacity=CONTEXT, dtype=dtype, threads=1).weights
    kernels, rows = CpuKernels(dtype, own=False), []
    for outputs, inputs in sorted({(one.outputs, one.inputs) for one in listed}):
        weights = [torch.randn(outputs, inputs) for _ in range(COPIES)]
        theirs = [kernels.reorder(one, "float32") for one in weights]
        ours = [own.pack(one.to(dtype)) for one in weights]
        for count in ROWS:
            x = torch.randn(count, inputs)
            narrow = x.to(dtype)
            works: dict[str, Callable[[], object]] = {
                "oneDNN float32": lambda x=x, theirs=theirs: [kernels.multiply(x, one) for one in theirs],
                NATIVE: lambda x=narrow, ours=ours: [own.multiply(x, one) for one in ours],
            }
            found = {name: spent / COPIES for name, spent in in_turn(rounds, works).items()}
            ratio = found["oneDNN float32"] / found[NATIVE]
            rows.append({"product": f"{inputs} to {outputs}", "rows": count, **found, "ratio": ratio})
    return rows


Made: TypeAlias = tuple[DenseShard, Numerics]


def build_proven_shard(name: str, checkpoint: Checkpoint, kernels: CpuKernels, dtype: torch.dtype) -> Made:
    """A shard of it, proven."""
    how = {"device": CPU, "dtype": dtype, "chunk": CHUNK, "capacity": CONTEXT, "layouts": checkpoint.layouts}
    found = probe(checkpoint.family, checkpoint.config, kernels, ProbeShape(**how))
    options = {"dtype": dtype, "slots": 1, "capacity": CONTEXT, "buckets": found.buckets}
    print(f"{name}: {found.mode}, probe {found.seconds:.1f} s; " + "; ".join(found.build_report()["products"]))
    return DenseShard(checkpoint.config, checkpoint, kernels.with_plan(found.plan), ShardPlacement(**options)), found


def steps(shards: Mapping[str, Made], rounds: int) -> list[dict[str, object]]:
    """Measure the steps of all shards in turn. Ratios are the first one's time over those of the others."""
    first, *others = shards
    vocab = min(shard.config.vocab_size for shard, _ in shards.values())
    tokens = torch.randint(5, vocab, (CONTEXT,), generator=torch.Generator().manual_seed(1))

    def work(name: str, kind: str, at: int) -> None:
        shard, found = shards[name]
        count, bucket = (CHUNK, CHUNK) if kind == "chunk" else (1, found.buckets[0])
        step = Step((Segment(0, at, count),), bucket, rows_only=kind == "chunk")
        hidden = shard.forward(step, tokens[at : at + count]).hidden
        if kind == "decode":
            shard.logits(step, hidden)[0].argmax()

    for name in shards:
        for start in range(0, CONTEXT - CHUNK, CHUNK):
            work(name, "chunk", start)
    rows = []
    for kind, at in CASES:
        turns = rounds if kind == "decode" else max(3, rounds // 5)
        spent = in_turn(turns, {name: lambda name=name, kind=kind, at=at: work(name, kind, at) for name in shards})
        ratios = {f"{first} / {name}": spent[first] / spent[name] for name in others}
        rows.append({"step": kind, "at": at, **spent, **ratios})
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    found = find_library()
    if found is None:
        raise SystemExit(f"nothing to compare: {explain_missing()}")
    dtype, checkpoint, threads = getattr(torch, options.dtype), Checkpoint.open(DEMO), torch.get_num_threads()
    with torch.inference_mode():
        torch.set_num_threads(1)
        by_product = products(checkpoint, NativeProducts(found, found.serving, dtype), dtype, options.rounds)
        torch.set_num_threads(threads)
        print_table("products, ms", by_product)
        both = {"oneDNN": CpuKernels(dtype, own=False), NATIVE: CpuKernels(dtype)}
        by_step = steps(
            {name: build_proven_shard(name, checkpoint, kernels, dtype) for name, kernels in both.items()},
            options.steps,
        )
        print_table("steps, ms", by_step)
    publish(options, "native", {"products": by_product, "steps": by_step}, device="cpu")


if __name__ == "__main__":
    main()
