"""Compares steps of a model in packed forms with its steps in bfloat16, in one process, in turn.

    python -m benchmarks.packed_steps FILE.gguf ... [--model adapters/demo] [--steps 25]

Milliseconds of processor time on the threads that serve, lower quartiles, of steps as `benchmarks.native` has them, and
what weights take in memory. Ratios are bfloat16's time over the other's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.arguments import benchmark_parser
from benchmarks.native import DEMO, build_proven_shard, steps
from benchmarks.results import publish
from benchmarks.tables import print_table

DTYPE = torch.bfloat16


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    with torch.inference_mode():
        found = {"bf16": Checkpoint.open(options.model)}
        found |= {path.stem: Checkpoint.open(path) for path in options.files}
        shards = {
            name: build_proven_shard(name, one.with_dtype(DTYPE), CpuKernels(DTYPE), DTYPE)
            for name, one in found.items()
        }
        kept = [{"": name, "weights, MB": shard.memory()["weights"] / 1e6} for name, (shard, _) in shards.items()]
        print_table("in memory", kept)
        by_step = steps(shards, options.steps)
        print_table("steps, ms", by_step)
    publish(options, "packed_steps", {"steps": by_step, "memory": kept}, device="cpu")


if __name__ == "__main__":
    main()
