"""The CUDA forward against the memory-bandwidth limit (decoding) and against transformers (prefill), in one run.

    python -m benchmarks.cuda_model [--record] [--layers 36] [--chunk 1024] [--contexts 8192 32768]

The model is an 8B-shaped Qwen3 with random bf16 weights, the same ones in both implementations. Decoding has one real
row at the smallest bucket, two graph replays and a greedy argmax for each token. The host fetches every token before
the next step (`decode`), or the token stays on the device (`decode, queued`). The limit is the bytes of weights, keys
and values that a token must read, over the best bandwidth that a large read or copy reaches in this run. Prefill
compares whole chunks at the largest bucket with one `transformers` forward (sdpa, logits_to_keep=1), interleaved.
Figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement, list_buckets
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import buckets_of
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
VOCABULARY = 151936


def config_8b(layers: int, positions: int) -> Qwen3Config:
    return Qwen3Config(VOCABULARY, 4096, 12288, layers, 32, 8, 128, positions, 1e6)


def seconds(work: Callable[[], Any], repeat: int = 1) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat


def bandwidth() -> dict[str, float]:
    """Bytes a second that large plain operations reach: a reading reduction and a copy (reads plus writes)."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    work = {"read": (source.amax, 1), "copy": (lambda: target.copy_(source), 2)}
    return {name: times * source.nbytes / min(seconds(run) for _ in range(8)) for name, (run, times) in work.items()}


def prefill(shard: DenseShard, tokens: torch.Tensor, chunk: int) -> None:
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        shard.forward(Step((Segment(0, start, len(part)),), chunk), part)


def decode(shard: DenseShard, context: int, count: int, fetch: bool, bucket: int = 1) -> float:
    """Seconds a token, greedy, from `context` rows on."""
    token = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    at = context

    def one() -> None:
        nonlocal token, at
        step = Step((Segment(0, at, 1),), bucket)
        token = shard.logits(step, shard.forward(step, token).hidden)[:1].argmax(-1)
        token = token.cpu() if fetch else token
        at += 1

    for _ in range(4):
        one()
    return seconds(one, count)


def wide_steps(shard: DenseShard, context: int, buckets: tuple[int, ...]) -> dict[int, float]:
    """Seconds of a forward with logits where every row of the bucket is real, as in a verification."""
    times = {}
    for bucket in buckets:
        step = Step((Segment(0, context, bucket),), bucket)
        tokens = torch.arange(bucket, device=DEVICE)

        def one(step: Step = step, tokens: torch.Tensor = tokens) -> None:
            shard.logits(step, shard.forward(step, tokens).hidden)

        for _ in range(3):
            one()
        times[bucket] = seconds(one, 10)
    return times


def buckets_are_exact(shard: DenseShard, buckets: tuple[int, ...], start: int = 1000) -> bool:
    """Return whether the rows after `start` have the same bits at every bucket, keys and values included."""
    tokens = torch.randint(0, VOCABULARY, (64,), device=DEVICE)
    first: tuple[torch.Tensor, ...] | None = None
    for bucket in buckets:
        hidden = []
        for at in range(0, 64, min(bucket, 64)):
            part = tokens[at : at + bucket]
            step = Step((Segment(0, start + at, len(part)),), bucket)
            hidden.append(shard.forward(step, part).hidden[: len(part)].cpu())
        found = (torch.cat(hidden), *(part for part in shard.rows.export(0, start, start + 64).values()))
        first = first or found
        if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(first, found, strict=True)):
            return False
    return True


@contextmanager
def transformers_model(config: Qwen3Config, weights: RandomWeights) -> Iterator[Any]:
    from transformers import Qwen3ForCausalLM  # noqa: PLC0415 - heavy, and only this half needs it

    from benchmarks.oracle import oracle_config  # noqa: PLC0415

    theirs = oracle_config(config, attn_implementation="sdpa")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(theirs).to(DTYPE)
    model = model.to_empty(device=DEVICE).eval()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights.read(name))
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    model.model.rotary_emb.inv_freq = (1.0 / config.rope_theta**exponents).to(DEVICE)
    yield model
    del model
    gc.collect()
    torch.cuda.empty_cache()


def compare_prefill(
    shard: DenseShard, weights: RandomWeights, contexts: list[int], chunk: int, repeat: int = 5
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with torch.inference_mode(), transformers_model(shard.config, weights) as theirs:
        for context in contexts:
            tokens = torch.randint(0, VOCABULARY, (context,), device=DEVICE)
            runs: dict[str, Callable[[], Any]] = {
                "rekindle": lambda tokens=tokens: prefill(shard, tokens, chunk),
                "transformers": lambda tokens=tokens: theirs(tokens[None], logits_to_keep=1, use_cache=False),
                "transformers, cache": lambda tokens=tokens: theirs(tokens[None], logits_to_keep=1, use_cache=True),
            }
            times: dict[str, list[float]] = {name: [] for name in runs}
            for decode_step in range(repeat + 1):
                for name, run in runs.items():
                    took = seconds(run)
                    if decode_step:
                        times[name].append(took)
            medians = {name: statistics.median(values) for name, values in times.items()}
            best = min(medians["transformers"], medians["transformers, cache"])
            results[str(context)] = {"seconds": times, "medians": medians, "ratio": medians["rekindle"] / best}
        results["logits_difference"] = _difference(shard, theirs)
    return results


def _difference(shard: DenseShard, theirs: Any, count: int = 100) -> float:
    """Relative distance of our logits from theirs over a short prompt."""
    tokens = torch.randint(0, VOCABULARY, (count,), device=DEVICE)
    step = Step((Segment(0, 0, count),), 128)
    ours = shard.logits(step, shard.forward(step, tokens).hidden)[:count]
    expected = theirs(tokens[None]).logits[0].float()
    return ((ours - expected).norm() / expected.norm()).item()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    buckets = buckets_of(list_buckets(DEVICE), args.chunk)
    config = config_8b(args.layers, max(args.contexts) + 4096)
    weights = RandomWeights(config, 0, DEVICE, DTYPE)
    speeds = bandwidth()
    torch.cuda.empty_cache()
    kernels = TritonKernels(DEVICE)
    shard = DenseShard(
        config,
        weights,
        kernels,
        ShardPlacement(device=DEVICE, dtype=DTYPE, slots=1, capacity=config.max_positions, buckets=buckets),
    )
    tokens = torch.randint(0, VOCABULARY, (max(args.contexts),), device=DEVICE)
    for _ in range(2):
        prefill(shard, tokens[: 2 * args.chunk], args.chunk)
    table = config.vocab_size * config.hidden_size * DTYPE.itemsize
    decoding = {}
    for context in (2048, *args.contexts):
        prefill(shard, tokens[:context], args.chunk)
        bytes_ = shard.memory()["weights"] - table + context * config.kv_bytes_per_token(DTYPE)
        limit = max(speeds.values()) / bytes_
        fetched = 1 / min(decode(shard, context, 100, fetch=True) for _ in range(3))
        queued = 1 / min(decode(shard, context, 100, fetch=False) for _ in range(3))
        decoding[str(context)] = {
            "bytes": bytes_,
            "limit": limit,
            "decode": fetched,
            "decode, queued": queued,
            "share of limit": fetched / limit,
        }
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernels": kernels.name,
        "buckets": buckets,
        "bandwidth": speeds,
        "decoding": decoding,
        "forward and logits at 2048, by bucket": wide_steps(shard, 2048, buckets[:-1]),
        "buckets is exact": buckets_are_exact(shard, buckets),
        "prefill": compare_prefill(shard, weights, args.contexts, args.chunk),
    }


def table(results: dict[str, Any]) -> str:
    speeds = ", ".join(f"{name} {value / 1e12:.2f} TB/s" for name, value in results["bandwidth"].items())
    lines = [
        f"{results['device']}, torch {results['torch']}, kernels {results['kernels']}, buckets {results['buckets']}",
        f"bandwidth: {speeds}",
        f"buckets is exact: {results['buckets is exact']}",
    ]
    for context, found in results["decoding"].items():
        lines.append(
            f"decode at {context:>6}: {found['decode']:6.1f} tok/s = {found['share of limit']:.1%} "
            f"of {found['limit']:.1f} (queued: {found['decode, queued']:.1f})"
        )
    for bucket, took in results["forward and logits at 2048, by bucket"].items():
        lines.append(f"bucket {bucket:>4}, all rows real: {took * 1e3:7.2f} ms")
    for context, found in results["prefill"].items():
        if isinstance(found, dict):
            medians = ", ".join(f"{name} {value:.4f} s" for name, value in found["medians"].items())
            lines.append(f"prefill {context:>6}: {medians}; ratio {found['ratio']:.3f}")
    lines.append(f"logits against transformers: relative difference {results['prefill']['logits_difference']:.2e}")
    return "\n".join(lines)


def make_figures(results: dict[str, Any]) -> list[Figure]:
    subject, found = "8B shape, bf16", list[Figure]()
    for context, one in results["decoding"].items():
        goal = Goal(at_least=75) if context == "2048" else None
        share = 100 * one["share of limit"]
        found.append(Figure("decode", f"{subject}, of the bandwidth's limit", context, "%", share, goal=goal))
    for context, one in results["prefill"].items():
        if isinstance(one, dict):
            ours, *theirs = one["medians"].values()
            peers, goal = {"transformers": min(theirs)}, Goal(at_most=1.15, against="transformers")
            found.append(Figure("cold", f"{subject}, forwards alone", context, "s", ours, peers, goal))
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    args = parser.parse_args()
    results = measure(args)
    publish(args, "cuda_model", results, make_figures(results))
    print(table(results))


if __name__ == "__main__":
    main()
