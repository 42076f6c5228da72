"""Compares keys and values in bfloat16, int8 and fp8: bytes, prefill, decoding behind long contexts, and whether rows
of any step are those of a chunk.

    python -m benchmarks.kv_rows [--shape 8b|demo] [--device cuda] [--layers 36] [--contexts 2048 32768] [--record]

8b: an 8B-shaped Qwen3 with random weights; demo: what comes with Rekindle. One forward of one row at the smallest
bucket, with its logits, is a decode step; of 16 rows a verification. Each form in a shard of its own that has the same
weights, one after the other; medians. `logits off` is the distance from bfloat16's behind the last context, relative.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

from adapters import demo
from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.formats.row_format import DTYPE_NAMES
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import print_table
from engine.loading.memory.device_survey import build_kernels

DTYPE = torch.bfloat16
TURNS = 3
VERIFIED = 16


@frozen
class RowsMeasured:
    """The figures of one form: milliseconds behind each context, and the logits behind the last one."""

    rows: dict[str, Any]
    logits: torch.Tensor


def milliseconds(device: torch.device, work: Callable[[], Any], count: int) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return 1e3 * (time.perf_counter() - start) / count


def step_of(shard: DenseShard, start: int, rows: int, bucket: int) -> Callable[[], torch.Tensor]:
    step, tokens = Step((Segment(0, start, rows),), bucket), torch.arange(rows, device=shard.spec.device)
    return lambda: shard.logits(step, shard.forward(step, tokens).hidden)


def prefill_tokens(shard: DenseShard, tokens: torch.Tensor, start: int) -> None:
    chunk = shard.spec.buckets[-1]
    for at in range(start, len(tokens), chunk):
        part = tokens[at : at + chunk]
        shard.forward(Step((Segment(0, at, len(part)),), chunk, rows_only=True), part)


def differing(shard: DenseShard, tokens: torch.Tensor) -> int:
    """Return how many of the last 64 rows have other keys, values or logits when they are computed in other pieces."""
    stop, found = len(tokens), list[torch.Tensor]()
    for bucket, count in ((64, 64), (4, 1), (4, 3), (16, 16), (64, 41)):
        logits = list[torch.Tensor]()
        for at in range(stop - 64, stop, count):
            part = tokens[at : min(at + count, stop)]
            step = Step((Segment(0, at, len(part)),), bucket)
            logits.append(shard.logits(step, shard.forward(step, part).hidden)[: len(part)].clone())
        rows = shard.rows.export(0, stop - 64, stop)
        seen = [torch.cat(logits).cpu(), *(one.transpose(0, 1).flatten(1) for one in rows.values())]
        found.append(torch.cat([one.contiguous().view(torch.uint8).view(64, -1) for one in seen], 1))
    return sum(int((one != found[0]).any(1).sum()) for one in found[1:])


def measure_rows(shard: DenseShard, tokens: torch.Tensor, contexts: list[int]) -> RowsMeasured:
    rows: dict[str, Any] = {"bytes a token": shard.rows.spec.token_bytes}
    done, device = 0, shard.spec.device
    prefill_tokens(shard, tokens[: 2 * shard.spec.buckets[-1]], 0)
    for context in contexts:
        rows[f"prefill to {context}"] = milliseconds(
            device, lambda to=context, at=done: prefill_tokens(shard, tokens[:to], at), 1
        )
        done = context
        decode, verify = step_of(shard, context, 1, shard.spec.buckets[0]), step_of(shard, context, VERIFIED, VERIFIED)
        for name, work, count in (("decode", decode, 30), ("verify", verify, 10)):
            work()
            rows[f"{name} at {context}"] = statistics.median(milliseconds(device, work, count) for _ in range(TURNS))
    rows["differing"] = differing(shard, tokens[:done])
    return RowsMeasured(rows, step_of(shard, done, 1, shard.spec.buckets[0])()[:1].float().cpu())


def subject(shape: str, layers: int, positions: int, device: torch.device) -> tuple[DenseConfig, WeightSource]:
    if shape == "demo":
        checkpoint = Checkpoint.open(demo.FOLDER)
        assert isinstance(checkpoint.config, DenseConfig)
        return checkpoint.config, checkpoint.with_dtype(DTYPE)
    config = Qwen3Config(151936, 4096, 12288, layers, 32, 8, 128, positions, 1e6)
    return config, RandomWeights(config, 0, device, DTYPE)


def make_figures(rows: list[dict[str, Any]], given: argparse.Namespace) -> list[Figure]:
    """Compare 8-bit rows with bf16 ones. Prefill must keep nine tenths of the speed."""
    plain, found = next(row for row in rows if row["rows"] == "bf16"), list[Figure]()
    for what, goal in (("prefill to", Goal(at_most=1.11, against="bf16")), ("decode at", None)):
        for row in (row for row in rows if row is not plain):
            for context in sorted(given.contexts):
                column, name = f"{what} {context}", f"{name_shape(given.shape)}, {row['rows']} rows, {what}"
                found.append(Figure("packed", name, str(context), "ms", row[column], {"bf16": plain[column]}, goal))
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=("8b", "demo"), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32768])
    given = parser.parse_args()
    device, most = torch.device(given.device), max(given.contexts)
    config, weights = subject(given.shape, given.layers, most + 1024, device)
    tokens = torch.randint(0, config.vocab_size, (most,), generator=torch.Generator().manual_seed(1)).to(device)
    buckets = (4, 16, 64, 1024 if device.type == "cuda" else 256)
    found = dict[str, RowsMeasured]()
    for name, kind in DTYPE_NAMES.items():
        how = {"device": device, "dtype": DTYPE, "slots": 1, "capacity": most + 256, "buckets": buckets}
        shard = DenseShard(config, weights, build_kernels(device, DTYPE), ShardPlacement(rows=kind, **how))
        found[name] = measure_rows(shard, tokens, sorted(given.contexts))
        shard.close()
    plain = found["bf16"].logits
    shown = [
        {"rows": name, **one.rows, "logits off": float((one.logits - plain).norm() / plain.norm())}
        for name, one in found.items()
    ]
    print_table(f"Rows of {given.shape} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}", shown)
    publish(given, f"kv_rows-{given.shape}", {"rows": shown}, make_figures(shown, given), given.device)


if __name__ == "__main__":
    main()
