"""Measures the time from `rekindle serve` to the ready line and to the first token, as a person would see it. There are
three starts. The first one finds nothing that an earlier one kept, and the second one comes after it. The third one
comes after weeks of use: it finds prompts in the cache and as many answers and responses as are kept.

`python -m benchmarks.startup [--runs 5]`
"""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from adapters.http.history import answer_tokens, response_store
from adapters.http.history.persistent_lru import add_digest
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table

ROOT = Path(__file__).parents[1]
PROMPTS, TOKENS = 8, 2048  # that are kept before the last start
ANSWER, RESPONSE = 300, 14_000  # tokens, and bytes: as many files as there may be are within their limits then
STEP = re.compile(r"starting: (?!still )(.*) \((.*) s\)")


def once(home: Path, prompts: int = 0) -> tuple[dict[str, Any], list[tuple[str, float]]]:
    """Seconds, and when which step began. home: where it keeps what it measured, and prompts, of which it is sent so
    many behind that.
    """
    log, spent, start = home / "log", processor(), time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**make_environment(), "XDG_CACHE_HOME": str(home)},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        ready = time.monotonic() - start
        assert line.startswith("ready"), log.read_text()
        url = line.split()[1]
        body = {"prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            next(chunk for chunk in response.iter_lines() if '"text":' in chunk)
            first = time.monotonic() - start
        for seed in range(prompts):
            tokens = random.Random(seed).choices(range(10, 4000), k=TOKENS)
            httpx.post(f"{url}/v1/completions", json={"prompt": tokens, "max_tokens": 1}, timeout=60).raise_for_status()
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    steps = [(step, float(seconds)) for step, seconds in STEP.findall(log.read_text())]
    return {"ready_s": ready, "first_token_s": first, "processor_s": processor() - spent}, steps


def fill(kept: Path) -> None:
    """Fill the folders with the answers and responses of weeks."""
    numbers = random.Random(0)
    for number in range(answer_tokens.MAX_TURNS):
        tokens = tuple(numbers.choices(range(10, 4000), k=ANSWER))
        record = answer_tokens.ENCODER.encode(answer_tokens.TurnRecord("", (f"call_{number}",), 3, tokens))
        (kept / "turns" / f"turn_{number:032x}").write_bytes(add_digest(record))
    for number in range(response_store.MAX_RESPONSES):
        name = f"resp_{number:024x}"
        response = response_store.ENCODER.encode({"id": name, "output": "x" * RESPONSE})
        (kept / "responses" / name).write_bytes(add_digest(b" \n" + response + b"\n[]"))


def make_environment() -> dict[str, str]:
    """The environment, of a person whose Python keeps what it has compiled: not every machine that measures lets it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def processor() -> float:
    """Seconds of it that the servers took so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    runs, steps = list[dict[str, Any]](), dict[str, Any]()
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as home:
            found = dict[str, float]()
            for name in ("first", "second", "full"):
                if name == "full":
                    once(Path(home), PROMPTS)
                    fill(Path(home) / "rekindle" / "kv")
                seconds, steps[name] = once(Path(home))
                found |= {f"{name}_{key}": value for key, value in seconds.items()}
            runs.append(found)
    medians = {name: median([run[name] for run in runs]) for name in runs[0]}
    print_table("From `rekindle serve` to ... (seconds; goal: first token under 5 s on two cores)", [*runs, medians])
    figures = [
        Figure("start", f"demo, {what}", name, "s", medians[f"{name}_{key}"], goal=Goal(at_most=goal))
        for what, key, goal in (("ready", "ready_s", 1.5), ("first token", "first_token_s", 5))
        for name in ("second", "full")
    ]
    publish(given, "startup", {"runs": runs, "median": medians, "steps_of_the_last": steps}, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
