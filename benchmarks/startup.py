"""From `make serve` (after installation) to the ready line and to the first token, as a person would see it.

`python -m benchmarks.startup [--runs 5]`
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import machine, median, raw, table

ROOT = Path(__file__).parents[1]


def once() -> dict[str, Any]:
    start = time.monotonic()
    process = subprocess.Popen(
        ["make", "--silent", "serve", "ARGS=--port 0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        ready = time.monotonic() - start
        assert line.startswith("ready"), line
        url = line.split()[1]
        body = {"prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            next(chunk for chunk in response.iter_lines() if '"text":' in chunk)
            first = time.monotonic() - start
        return {"ready_s": ready, "first_token_s": first}
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = [once() for _ in range(parser.parse_args().runs)]
    medians = {name: median([run[name] for run in runs]) for name in runs[0]}
    table("From `make serve` to ... (seconds; goal: first token under 5 s on CPU)", [*runs, medians])
    raw("startup", {"runs": runs, "median": medians, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
