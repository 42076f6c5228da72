"""Compares answers of one model in many packed formats with themselves, in all ways of `benchmarks.exactness`.

    python -m benchmarks.exactness_formats MODEL... [--device cuda] [--prompts 20] [--at-once 4] [--limit 300]

MODEL is a GGUF file or a folder, such as those that `benchmarks.widened` and `python -m tests.models.quantised` write.
Each model gets a process of its own. All are asked the same prompts, and earlier text is copied, since these models
have no draft. Packed weights are multiplied packed, also where a CPU would have chosen to unpack them. `packed` counts
the products of a CPU that are packed. --limit: seconds after which no further model begins.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import asdict, frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.exactness import ANSWER, LONGEST, draw_prompts
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table

SUBJECT = "widened demo in packed formats"


@frozen
class FormatFindings:
    """What became of one model: ways and answers, how many differ, and how many products a CPU multiplies packed."""

    ways: int
    jobs: int
    differing: int
    tokens: int  # of each way
    distinct: float
    restored: int
    packed: int
    numerics: str

    @classmethod
    def read(cls, line: str) -> FormatFindings:
        """Read the result of `benchmarks.exactness`, which is its last line."""
        result = json.loads(line)
        rows, numerics = result["rows"], result["numerics"]
        return cls(
            ways=len(rows),
            jobs=sum(row["jobs"] for row in rows),
            differing=sum(row["differing"] for row in rows) + result.get("executed", {}).get("differing", 0),
            tokens=rows[0]["tokens"],
            distinct=rows[0]["distinct"],
            restored=sum(row["restored"] for row in rows),
            packed=sum("packed" in product for product in numerics.get("products", ())),
            numerics=numerics.get("class", ""),
        )


def measure_model(model: Path, prompts: Path, given: argparse.Namespace) -> FormatFindings | None:
    """Return what one model's process found. None where it failed: then the reason is printed."""
    begun = time.monotonic()
    words = [sys.executable, "-m", "benchmarks.exactness", f"--model={model}", f"--asked={prompts}", "--unpack=never"]
    words += [f"--{name}={getattr(given, name)}" for name in ("device", "threads", "prompts", "longest", "answer")]
    with tempfile.TemporaryDirectory() as home:  # earlier starts may have chosen to unpack
        environment = {**os.environ, "XDG_CACHE_HOME": home}
        done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    # The last line is the result, whether answers differ (1) or not.
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines or not lines[-1].startswith("{"):
        print(f"{model.name} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}", flush=True)
        return None
    found = FormatFindings.read(lines[-1])
    print(f"{time.monotonic() - begun:.0f} s, {model.name}: {found}", flush=True)
    return found


def make_figure(found: Mapping[str, FormatFindings], device: str) -> Figure:
    jobs, differing = sum(one.jobs for one in found.values()), sum(one.differing for one in found.values())
    ways = min(one.ways for one in found.values())
    where = ", H200" if device == "cuda" else ""
    at = f"{ways} ways, {len(found)} formats"
    return Figure("exactness", f"{SUBJECT}{where}", at, f"of {jobs:,} differ", differing, goal=Goal(at_most=0))


def measure_all(given: argparse.Namespace) -> dict[str, FormatFindings]:
    """Return the findings by the names of the models, in the order in which they are named. Ctrl-C ends the models that
    are being measured. The findings are then those of the others.
    """
    started = time.monotonic()
    done = dict[Path, FormatFindings]()

    def measure(model: Path) -> None:
        if given.limit and time.monotonic() - started > given.limit:
            print(f"no time left for {model.name}", flush=True)
        elif (found := measure_model(model, asked, given)) is not None:
            done[model] = found

    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "prompts.json"
        asked.write_text(json.dumps(draw_prompts(given.prompts, given.longest)))
        with ThreadPoolExecutor(given.at_once) as pool:
            try:
                list(pool.map(measure, given.models))
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                print("interrupted: these are the findings so far", flush=True)
    return {model.stem: done[model] for model in given.models if model in done}


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a prompt at most")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--at-once", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=0, help="seconds; 0: none")
    return parser.parse_args()


def main() -> int:
    given = parse_options()
    found = measure_all(given)
    print_table("Packed formats", [{"model": name, **asdict(one)} for name, one in found.items()])
    figures = [make_figure(found, given.device)] if found else []
    raw = {"formats": {name: asdict(one) for name, one in found.items()}}
    publish(given, "exactness_formats", raw, figures, given.device)
    return 1 if len(found) < len(given.models) or any(one.differing for one in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
