"""The demo over HTTP beside llama.cpp's server on the same weights, and beside ourselves at another checkout, in turn.

    python -m benchmarks.cpu_peer [--llama LLAMA-SERVER] [--before CHECKOUT] [--rounds 2] [--levels 1,4,16]

`rekindle bench serve` asks every server alike: prompts that were never sent before, at each level, then first tokens
behind prompts of several lengths. llama.cpp's server comes from the sdist of `llama-cpp-python` (`cmake --build BUILD
--target llama-server` of what is in its vendor/); the demo is written as a GGUF file of bf16 for it. Another checkout
needs its products compiled (`python hatch_build.py`). Figures are medians of rounds. Both want the machine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.report import machine, median, raw, table
from tests.models.ggufs import Kind, write_gguf

ROOT = Path(__file__).parents[1]
DEMO, CONTEXT, STREAMS = ROOT / "adapters" / "demo", 8192, 16
PROMPTS, ANSWER = (512, 2048, 7800), 64
PATIENCE = 120.0  # seconds for a server to come up


@contextmanager
def listening(command: Sequence[str], tree: Path) -> Iterator[tuple[str, float]]:
    """Its address, and the seconds until it had a model to offer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start, url = time.monotonic(), f"http://127.0.0.1:{port}"
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [*command, "--port", str(port)], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, **quiet
    )
    try:
        while not ready(url):
            if process.poll() is not None or time.monotonic() - start > PATIENCE:
                raise SystemExit(f"no server: {' '.join(command)}")
            time.sleep(0.05)
        yield url, time.monotonic() - start
    finally:
        process.terminate()
        process.wait(30)


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health").is_success and httpx.get(url + "/v1/models").is_success
    except httpx.TransportError:
        return False


def asked(url: str, *words: str) -> list[Mapping[str, Any]]:
    command = [sys.executable, "-m", "engine", "bench", "serve", "--url", url, "--json", *words]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    found: list[Mapping[str, Any]] = json.loads(done.stdout)["levels"]
    return found


def figures(command: Sequence[str], tree: Path, levels: str) -> dict[str, float]:
    with listening(command, tree) as (url, seconds):
        found = {"ready, s": seconds}
        streams = asked(url, "--concurrency", levels, "--prompt-tokens", "256", "--answer-tokens", str(ANSWER))
        found |= {f"{one['level']}, tok/s": one["tokens_s"] for one in streams}
        for length in PROMPTS:
            words = ("--requests", "3", "--prompt-tokens", str(length), "--answer-tokens", str(ANSWER))
            [one] = asked(url, *words)
            found[f"first behind {length}, ms"] = one["first_token_ms"][0]
            found[f"then, tok/s ({length})"] = one["stream_tokens_s"][0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--levels", default="1,4,16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        file, ours = Path(scratch) / "demo.gguf", [sys.executable, "-m", "engine", "serve", "demo"]
        servers: dict[str, tuple[Sequence[str], Path]] = {}
        for name, tree in (("ours", ROOT), ("before", options.before)):
            if tree is not None:
                servers |= {name: ([*ours, "--draft", "none"], tree), f"{name}, draft": (ours, tree)}
        if options.llama is not None:
            write_gguf(file, DEMO, Kind.BF16, tokenizer="smollm")
            how = ("-t", str(torch.get_num_threads()), "-fa", "on", "--cache-ram", "0")
            places = ("-np", str(STREAMS), "-c", str(STREAMS * CONTEXT))
            servers["llama.cpp"] = [str(options.llama), "-m", str(file), *how, *places], ROOT
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(options.rounds):
            for name, (command, tree) in servers.items():
                rounds[name].append(figures(command, tree, options.levels))
                print(name, {what: round(value, 2) for what, value in rounds[name][-1].items()}, flush=True)
    found = {
        name: {what: median(one[what] for one in runs) for what in runs[0]} for name, runs in rounds.items() if runs
    }
    first = next(iter(found.values()))
    table("medians", [{"": what, **{name: one[what] for name, one in found.items()}} for what in first])
    raw("cpu_peer", {"machine": machine(), "rounds": rounds})


if __name__ == "__main__":
    main()
