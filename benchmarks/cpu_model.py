"""Prefill and decoding on the CPU against transformers: same weights, same run, interleaved.

    python -m benchmarks.cpu_model [FOLDER] [--dtypes float32 bfloat16] [--prompts 512 2048 8000] [--tokens 48]
                                   [--repeat 3] [--chunk 256] [--record]

FOLDER is a checkpoint of any family; without one the demo. Prefill: rows [0, n) of a prompt in chunks of C, against one
transformers forward (sdpa, logits_to_keep=1). Decoding: greedy, one token a step at the smallest bucket, logits
fetched, against one transformers forward a token (a static cache; of a hybrid its own); blocks of 8 tokens alternate.
Figures are medians, ratios are transformers' time over ours (above 1 we are faster); raw seconds go to --json, one line
a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

from adapters.checkpoint.config_fields import DTYPES
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import probe
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median

DEMO = Path(__file__).parents[1] / "adapters" / "demo"
CPU = torch.device("cpu")
BLOCK = 8  # tokens that one side decodes before the other goes on, as a cache warms up in use


@define
class Ours:
    shard: DenseShard
    numerics: Numerics

    def prefill(self, tokens: Tensor) -> None:
        chunk = self.numerics.chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            bucket = next(bucket for bucket in self.numerics.buckets if bucket >= len(part))
            self.shard.forward(Step((Segment(0, start, len(part)),), bucket, rows_only=True), part)

    def decode(self, token: int, position: int) -> int:
        step = Step((Segment(0, position, 1),), self.numerics.buckets[0])
        hidden = self.shard.forward(step, torch.tensor([token])).hidden
        found = int(self.shard.logits(step, hidden)[0].argmax())
        self.shard.commit(step, [1])
        return found


@define
class Theirs:
    """cache: None where the model makes its own, anew for each prompt, as hybrids do."""

    model: Any
    cache: Any = None

    def prefill(self, tokens: Tensor) -> None:
        if isinstance(self.cache, StaticCache):
            self.cache.reset()
        else:
            self.cache = None
        found = self.model(tokens[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = found.past_key_values

    def decode(self, token: int, position: int) -> int:
        at = torch.tensor([[position]])
        found = self.model(torch.tensor([[token]]), position_ids=at, past_key_values=self.cache, use_cache=True)
        return int(found.logits[0, -1].argmax())


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(ours: Ours, theirs: Theirs, prompt: Tensor, tokens: int, repeat: int) -> list[dict[str, Any]]:
    """The prompt's last token is fed by the first decoding step, as the engine does."""
    head, last = prompt[:-1], int(prompt[-1])
    prefill: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repeat):
        prefill["theirs"].append(seconds(lambda: theirs.prefill(head)))
        prefill["ours"].append(seconds(lambda: ours.prefill(head)))
    decode: dict[str, list[float]] = {"ours": [], "theirs": []}
    said: dict[str, list[int]] = {"ours": [last], "theirs": [last]}
    for start in range(0, tokens, BLOCK):
        for name, model in (("theirs", theirs), ("ours", ours)):
            for position in range(len(head) + start, len(head) + min(start + BLOCK, tokens)):
                began = time.perf_counter()
                said[name].append(model.decode(said[name][-1], position))
                decode[name].append(time.perf_counter() - began)
    agree = sum(mine == his for mine, his in zip(said["ours"][1:], said["theirs"][1:], strict=True))
    return [
        {"stage": "prefill", "prompt": len(prompt), "unit_tokens": len(head), **prefill},
        {"stage": "decode", "prompt": len(prompt), "unit_tokens": 1, "agree": agree / tokens, **decode},
    ]


GOALS = {
    ("prefill", "float32"): 0.9,
    ("prefill", "bfloat16"): 0.9,
    ("decode", "float32"): 1.2,
    ("decode", "bfloat16"): 1.5,
}


def make_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Say how many times as fast as transformers we are, by the medians of the rounds."""
    found = list[Figure]()
    for row in sorted(rows, key=lambda row: (row["stage"], row["dtype"])):
        promise = "cold" if row["stage"] == "prefill" else "decode"
        subject = f"{row['model']}, {row['dtype']}, {row['stage']} against transformers"
        ratio, goal = median(row["theirs"]) / median(row["ours"]), Goal(at_least=GOALS[row["stage"], row["dtype"]])
        found.append(Figure(promise, subject, str(row["prompt"]), "x", ratio, goal=goal))
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=[*DTYPES])
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 2048, 8000])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    checkpoint = Checkpoint.open(options.folder or DEMO)
    config = checkpoint.config
    capacity = min(config.max_positions, max(options.prompts) + options.tokens)
    rows = []
    for dtype_name in options.dtypes:
        dtype, kernels = getattr(torch, dtype_name), CpuKernels(getattr(torch, dtype_name))
        how = {"device": CPU, "dtype": dtype, "chunk": options.chunk, "capacity": capacity}
        numerics = probe(checkpoint.family, config, kernels, **how)
        serving = kernels.with_plan(numerics.plan)
        shard = DenseShard(
            config, checkpoint, serving, dtype=dtype, slots=1, capacity=capacity, buckets=numerics.buckets
        )
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype).eval()
        name = checkpoint.folder.name
        print(f"{name}, {dtype_name}: {numerics.mode}, buckets {numerics.buckets}, decoding at {numerics.buckets[0]}")
        print(f"  {numerics.numerics_class}, {torch.get_num_threads()} threads, probe {numerics.seconds:.2f} s")
        with torch.inference_mode():
            for length in options.prompts:
                prompt = torch.randint(5, config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
                theirs = Theirs(model)
                if not shard.state_specs:
                    theirs.cache = StaticCache(config=model.config, max_cache_len=length + options.tokens)
                Ours(shard, numerics).prefill(prompt[:64])
                for row in compare(Ours(shard, numerics), theirs, prompt, options.tokens, options.repeat):
                    rows.append({"model": name, "dtype": dtype_name, "kernels": numerics.kernels, **row})
                    print_row(rows[-1])
    publish(options, f"cpu_model-{checkpoint.folder.name}", {"rows": rows}, make_figures(rows), "cpu")


def print_row(row: dict[str, Any]) -> None:
    ours, theirs = statistics.median(row["ours"]), statistics.median(row["theirs"])
    speed = f"{row['unit_tokens'] / ours:8.0f} tok/s ours {row['unit_tokens'] / theirs:8.0f} transformers"
    agree = f"  same token {row['agree']:.0%}" if "agree" in row else ""
    times = f"{ours * 1e3:9.2f} ms ours {theirs * 1e3:9.2f} ms transformers"
    ratio = theirs / ours
    print(f"  {row['stage']:8} {row['prompt']:6}  {times}  {speed}  ratio {ratio:.2f}{agree}", flush=True)


if __name__ == "__main__":
    main()
