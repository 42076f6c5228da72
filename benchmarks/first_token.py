"""Measures the first token of a new prompt over HTTP, compared with what its forwards alone take on the same device.

    python -m benchmarks.first_token [--shape 8b] [--folder DIR] [--lengths 2048,8192,32000] [--runs 5]

alone: the model's chunks and the one step behind them, as the server would have them carried out, with nothing around
them. quiet: the server has had nothing to do for a moment. behind: another request has just ended, with as long a
prompt, whose rows are still to be kept; it came after such a moment. in a row: the same without one, so that rows of
earlier requests are still being kept, too. Medians of as many; goal: at most 1.05 times as long as `alone`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch

from adapters import demo
from adapters.device.lane.buckets import bucket_of
from adapters.models.kernels.step import Segment, Step
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint, listening
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import median, print_table
from effects.ids import PAGE
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import Options, build_options

KINDS = ("quiet", "behind", "in a row")
MOMENT_S = 1.0
ANSWER = 8  # tokens of the request in front


def prefill(target: LoadedModel, prompt: torch.Tensor) -> float:
    """Seconds until the token behind it is on the host. On the lane."""
    shard, chunk, last = target.shard, target.settings.chunk, len(prompt) - 1
    buckets = target.numerics.buckets
    if target.settings.pages:
        shard.rows.seat(0, 0, 0, tuple(range(-(-len(prompt) // PAGE))))
    started = time.perf_counter()
    for start in range(0, last, chunk):
        part = prompt[start : min(start + chunk, last)]
        step = Step((Segment(0, start, len(part)),), bucket_of(buckets, len(part)), rows_only=True)
        shard.forward(step, part)
    step = Step((Segment(0, last, 1),), bucket_of(buckets, 1))
    shard.logits(step, shard.forward(step, prompt[last:]).hidden)[:1].argmax(-1).cpu()
    return time.perf_counter() - started


async def alone(options: Options, lengths: Sequence[int], runs: int) -> dict[int, list[float]]:
    target = await load_target(options)
    draw = torch.Generator().manual_seed(1)
    try:
        found = dict[int, list[float]]()
        for length in lengths:
            prompts = [torch.randint(100, 4000, (length,), generator=draw) for _ in range(runs + 1)]
            found[length] = [await target.lane.run(partial(prefill, target, prompt)) for prompt in prompts][1:]
        return found
    finally:
        await target.close()


def first_token(client: httpx.Client, length: int, draw: random.Random, answer: int = 1) -> float:
    """Seconds until there is one; the answer is read to its end."""
    prompt = [draw.randrange(100, 4000) for _ in range(length)]
    body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True}
    started, found = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.raise_for_status().iter_lines():
            if '"text":' in line and not found:
                found = time.perf_counter() - started
    return found


def measure_first_tokens(client: httpx.Client, lengths: Sequence[int], runs: int) -> dict[str, dict[int, list[float]]]:
    draw, found = random.Random(1), {kind: dict[int, list[float]]() for kind in KINDS}
    for length in lengths:
        for kind, times in found.items():
            times[length] = []
            for _ in range(runs):
                if kind != "in a row":
                    time.sleep(MOMENT_S)
                if kind != "quiet":
                    first_token(client, length, draw, ANSWER)
                times[length].append(first_token(client, length, draw))
    return found


def make_figures(rows: Sequence[Mapping[str, Any]], shape: str) -> list[Figure]:
    """Compare first tokens over HTTP with the forwards alone."""
    goal = Goal(at_most=1.05, against="forwards alone")
    found = list[Figure]()
    for row in rows:
        subject, peers = f"{name_shape(shape)}, {row['tokens']} tokens over HTTP", {"forwards alone": row["alone, ms"]}
        found += [Figure("cold", subject, kind, "ms", row[f"{kind}, ms"], peers, goal) for kind in KINDS]
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument("--folder", type=Path, help="where random weights are written, and kept")
    parser.add_argument("--lengths", default="512,2048,7800")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    lengths = tuple(map(int, given.lengths.split(",")))
    with tempfile.TemporaryDirectory() as scratch:
        home, model = Path(scratch), demo.FOLDER
        if given.shape != "demo":
            model = (given.folder or home) / "model"
            if not model.exists():
                checkpoint(model, given)
        context = max(lengths) + 256
        options = build_options(model=str(model), draft="none", slots=given.slots, max_ctx=context)
        times = {"alone": anyio.run(alone, options, lengths, given.runs)}
        words = [sys.executable, "-m", "engine", "serve", str(model), "--draft", "none", "--port", "0"]
        words += ["--slots", str(given.slots), "--max-ctx", str(context)]
        with listening(words, home) as (client, _, _):
            first_token(client, 100, random.Random(2))
            times |= measure_first_tokens(client, lengths, given.runs)
    rows = []
    for length in lengths:
        middle = {kind: median(one[length]) for kind, one in times.items()}
        ratios = {f"{kind} / alone": middle[kind] / middle["alone"] for kind in KINDS}
        rows.append({"tokens": length, **{f"{kind}, ms": 1e3 * one for kind, one in middle.items()}, **ratios})
    print_table("First token of a new prompt; medians", rows)
    publish(given, f"first_token-{given.shape}", {"times": times, "rows": rows}, make_figures(rows, given.shape))


if __name__ == "__main__":
    main()
