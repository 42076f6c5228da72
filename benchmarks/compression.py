"""Measures the time to the first token of a long prompt, compressed and plain in turn on one server, and the part of it
that scoring takes.

python -m benchmarks.compression [--runs 3]                          the shipped demo and its drafter, 8,000 tokens
python -m benchmarks.compression --shape 8b --tokens 32768,65536 --keep 0.05      random weights of an 8B model's
                                                                     shape and of a 0.6B drafter's, on CUDA
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import demo
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint
from benchmarks.freezing import processor_s
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import median, print_table
from tests.e2e.server import Running, serving

MARGIN = 256  # rows of a context in addition to the prompt's
WARM = 9000  # tokens of a prompt that nothing is timed of


def make_figures(rows: list[dict[str, Any]], subject: str, how: argparse.Namespace) -> list[Figure]:
    """The goal is 4x where a GPU serves a model's shape, and 3x for the demo on two cores."""
    goal, what = Goal(at_least=4 if how.shape else 3), f"{subject}, first token sooner, keep {how.keep:g}"
    return [Figure("compression", what, str(row["tokens"]), "x", row["times"], goal=goal) for row in rows]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default=str(demo.DRAFTER))
    parser.add_argument("--shape", choices=SHAPES, help="of a model with random weights, in the place of --model")
    parser.add_argument("--drafter-shape", choices=SHAPES, default="0.6b", help="of the drafter with it")
    parser.add_argument("--folder", type=Path, help="where random weights are written, and found again")
    parser.add_argument("--tokens", default="8000", help="of prompts")
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=3)
    policies = ("auto", "persistent", "request-scoped")
    parser.add_argument("--residency", choices=policies, default="persistent", help="of the drafter")
    how = parser.parse_args()
    lengths = [int(one) for one in how.tokens.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        words = [how.model, "--prefill-drafter", how.drafter]
        if how.shape:
            started, folder = time.perf_counter(), how.folder or Path(scratch)
            model, drafter = (write_model(folder, shape, 2 * max(lengths)) for shape in (how.shape, how.drafter_shape))
            print(f"weights written in {time.perf_counter() - started:.1f} s", flush=True)
            words = [model, "--prefill-drafter", drafter, "--max-ctx", str(max(lengths) + MARGIN)]
        rows = measure_prompts([*words, "--draft-residency", how.residency], lengths, how)
    print_table("First token, medians", summarise_rows(rows))
    subject = name_shape(how.shape) if how.shape else Path(how.model).name
    publish(how, f"compression-{how.shape or 'demo'}", {"rows": rows}, make_figures(summarise_rows(rows), subject, how))


def write_model(folder: Path, shape: str, positions: int) -> str:
    path = folder / shape
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint(path, argparse.Namespace(shape=shape, layers=0), positions)
    return str(path)


def measure_prompts(words: Sequence[str], lengths: Sequence[int], how: argparse.Namespace) -> list[dict[str, Any]]:
    draw, rows = random.Random(1), list[dict[str, Any]]()
    with serving(*words, "--slots", "1", "--host-cache-budget", "0") as server:
        print(f"ready in {server.seconds:.1f} s", flush=True)
        for mode in ("off", "always"):
            first_token(server, prompt(draw, min(WARM, *lengths)), how.keep, mode)
        for run in range(how.runs):
            for length in lengths:
                for mode in ("off", "always"):
                    row = {"run": run, "mode": mode, **first_token(server, prompt(draw, length), how.keep, mode)}
                    rows.append(row)
                    print(row, flush=True)
    return rows


def prompt(draw: random.Random, length: int) -> list[int]:
    """Return tokens that were not sent before."""
    return [draw.randrange(100, 4000) for _ in range(length)]


def first_token(server: Running, sent: Sequence[int], keep: float, mode: str) -> dict[str, Any]:
    fields = {"max_tokens": 1, "temperature": 0, "compression": {"mode": mode, "keep_ratio": keep}}
    start, spent = time.perf_counter(), processor_s(server)
    response = server.complete(sent, prefix_cache={"scope": "off"}, **fields)
    took, spent = time.perf_counter() - start, processor_s(server) - spent
    answer = response.raise_for_status().json()["rekindle"]
    compression = answer["compression"] or {"kept_tokens": len(sent), "time_ms": 0.0}
    return {
        "tokens": len(sent),
        "kept": compression["kept_tokens"],
        "seconds": round(took, 3),
        "processor_s": round(spent, 2),
        "scoring_ms": compression["time_ms"],
        "stages_ms": answer["stages_ms"],
    }


def summarise_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    for length in sorted({row["tokens"] for row in rows}):
        plain, short = (
            [row for row in rows if row["mode"] == mode and row["tokens"] == length] for mode in ("off", "always")
        )
        seconds, spent = (
            [median(row[name] for row in some) for some in (plain, short)] for name in ("seconds", "processor_s")
        )
        found.append(
            {
                "tokens": length,
                "kept": short[0]["kept"],
                "plain, s": seconds[0],
                "compressed, s": seconds[1],
                "times": seconds[0] / seconds[1],
                "processor, s": f"{spent[0]:.2f} / {spent[1]:.2f}",
                "scoring, s": median(row["scoring_ms"] for row in short) / 1e3,
            }
        )
    return found


if __name__ == "__main__":
    main()
