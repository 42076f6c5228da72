"""A small model with experts against a dense one of equal active size, random weights, on this processor.

    python -m benchmarks.experts [--rounds 9] [--dtype bfloat16] [--threads 1]

Both in one process, in turns, on kernels that are proven first. The dense one has as many columns in a feed-forward as
the experts of a row have. Decoding is one token for one slot, and one for each of four; prefill is a chunk.
Seconds are the process's, of one core by default: what else the machine does counts as little as it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.arguments import benchmark_parser
from benchmarks.results import publish
from benchmarks.tables import median, print_table

HIDDEN, LAYERS, ROWS, CAPACITY, SLOTS = 512, 4, 256, 512, 4
EXPERTS = ExpertsShape(32, 4, 256, is_normalized=True)
REST = (LAYERS, 8, 2, 64, 4096, 1e6)


def configs() -> dict[str, DenseConfig]:
    return {
        "experts": Qwen3MoeConfig(4096, HIDDEN, 1024, *REST, experts=EXPERTS),
        "dense": Qwen3Config(4096, HIDDEN, EXPERTS.chosen * EXPERTS.inner, *REST),
    }


def build_shard(config: DenseConfig, dtype: torch.dtype) -> DenseShard:
    buckets = tuple(bucket for bucket in BUCKETS if bucket <= ROWS)
    listed = config.products(buckets, capacity=CAPACITY, dtype=dtype, threads=torch.get_num_threads())
    proof = CpuKernels(dtype).prove(listed)
    assert proof.plan is not None, proof.failures
    for line in proof.plan.describe_lines():
        print("  ", line)
    weights = RandomWeights(config, scale=HIDDEN**-0.5)
    kernels = CpuKernels(dtype).with_plan(proof.plan)
    shape = {"dtype": dtype, "slots": SLOTS, "capacity": CAPACITY, "buckets": buckets}
    return DenseShard(config, weights, kernels, ShardPlacement(**shape))


def time_runs(run: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count


def tasks(shard: DenseShard) -> dict[str, Callable[[], object]]:
    tokens = torch.randint(0, shard.spec.vocab_size, (ROWS,), generator=torch.Generator().manual_seed(1))
    chunk = Step((Segment(0, 0, ROWS),), ROWS, rows_only=True)
    shard.forward(chunk, tokens)
    for slot in range(1, SLOTS):
        shard.rows.copy(0, slot, ROWS)
    at = [0]

    def decoded(slots: int) -> None:
        at[0] = (at[0] + 1) % (ROWS - SLOTS)
        step = Step(tuple(Segment(slot, ROWS, 1) for slot in range(slots)), SLOTS)
        shard.logits(step, shard.forward(step, tokens[at[0] : at[0] + slots]).hidden)

    return {
        "decode, one": lambda: decoded(1),
        "decode, four": lambda: decoded(SLOTS),
        "prefill": lambda: shard.forward(chunk, tokens),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    models = {name: tasks(build_shard(config, getattr(torch, given.dtype))) for name, config in configs().items()}
    counts, rows = {"decode, one": 20, "decode, four": 20, "prefill": 2}, {"decode, one": 1, "decode, four": SLOTS}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds):
        for task, count in counts.items():
            for name, runs in models.items():
                found.setdefault((task, name), []).append(rows.get(task, ROWS) / time_runs(runs[task], count))
    lines = [
        {
            "task": task,
            **{f"{name}, tokens/s of processor time": median(found[task, name]) for name in models},
            "experts / dense": median(
                one / other for one, other in zip(found[task, "experts"], found[task, "dense"], strict=True)
            ),
        }
        for task in counts
    ]
    print_table(f"{EXPERTS.count} experts, {EXPERTS.chosen} of them active, in {given.dtype}", lines)
    figures = {f"{task}, {name}": values for (task, name), values in found.items()}
    publish(given, "experts", {"dtype": given.dtype, "tokens_per_s": figures, "rows": lines}, device="cpu")


if __name__ == "__main__":
    main()
