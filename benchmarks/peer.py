"""A model over HTTP beside llama.cpp's server on the same weights, and beside ourselves at another checkout, in turn.

    python -m benchmarks.peer [--llama LLAMA-SERVER] [--before CHECKOUT] [--rounds 2] [--levels 1,4,16]
    python -m benchmarks.peer --file MODEL.gguf [--shape 8b] --llama LLAMA-SERVER --levels 1,4
    python -m benchmarks.peer --shape 8b --llama LLAMA-SERVER --levels 1,8,32 --lengths 2048,8192,32768 [--folder DIR]

`rekindle bench serve` asks every server alike: prompts that were never sent before, at each level, then first tokens
behind prompts of several lengths. llama.cpp's server comes from the sdist of `llama-cpp-python` (`cmake --build BUILD
--target llama-server` of what is in its vendor/, with `-DGGML_CUDA=ON` for a GPU); the weights are written as a GGUF
file of bf16 for it, or both serve that of --file. 8b: random weights of an 8B model's shape, on CUDA; what is written
in DIR is found there again. Levels and lengths are asked of two servers, one after the other, so that slots are as long
as they must be: "memory" is what the first one and its processes have in memory in the end, each its share of common
pages; "ready again" is the same command once more, at which ours finds what the first one kept. Another checkout needs
its products compiled (`python hatch_build.py`). Figures are medians of rounds. All want the machine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from attrs import frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint
from benchmarks.results import Figure, Goal, name_shape, publish, slug
from benchmarks.tables import median, print_table
from tests.models.ggufs import Kind, packed, write_gguf

ROOT = Path(__file__).parents[1]
DEMO, MARGIN = ROOT / "adapters" / "demo", 256  # rows that what is sent may take besides
PATIENCE = 300.0  # seconds for a server to come up
POLL_S = 0.05  # between questions whether it is: a server that answers them meanwhile comes up later for it


@contextmanager
def listening(command: Sequence[str], tree: Path, home: Path) -> Iterator[tuple[str, float]]:
    """Its address, and the seconds until it had a model to offer. home: where it keeps what it measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", home / "server.log"
    path = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    with httpx.Client() as client, log.open("a") as told:
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(home)},
            stdout=told,
            stderr=told,
        )
        try:
            while not ready(client, url):
                if process.poll() is not None or time.monotonic() - start > PATIENCE:
                    raise SystemExit(f"no server: {' '.join(command)}\n{log.read_text()[-2000:]}")
                time.sleep(POLL_S)
            yield url, time.monotonic() - start
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url + "/health").is_success and client.get(url + "/v1/models").is_success
    except httpx.TransportError:
        return False


def asked(url: str, *words: str) -> list[Mapping[str, Any]]:
    command = [sys.executable, "-m", "engine", "bench", "serve", "--url", url, "--json", *words]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: some requests failed, which the figures say
        raise SystemExit(done.stderr[-2000:])
    found: list[Mapping[str, Any]] = json.loads(done.stdout)["levels"]
    return found


def children(process: int) -> list[int]:
    """All that it has started, and these have."""
    found = list[int]()
    for each in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, each.read_text().split()):
            found += [child, *children(child)]
    return found


def memory() -> float:
    """MB of all that this process has started."""
    rolled = [Path(f"/proc/{child}/smaps_rollup").read_text() for child in children(os.getpid())]
    return sum(int(re.findall(r"^Pss:\s+(\d+)", one, re.MULTILINE)[0]) for one in rolled) * 1024 / 1e6


@frozen
class Contender:
    """command: of slots and the rows of each."""

    command: Callable[[int, int], list[str]]
    tree: Path


def figures(server: Contender, home: Path, given: argparse.Namespace) -> dict[str, float]:
    found, answer, warmth = dict[str, float](), str(given.answers), ("--temperature", given.temperature)
    levels, lengths = (tuple(map(int, words.split(","))) for words in (given.levels, given.lengths))
    command = server.command(max(levels), given.prompts + given.answers + MARGIN)
    with listening(command, server.tree, home) as started:
        url, found["ready, s"] = started
        words = ("--concurrency", given.levels, "--prompt-tokens", str(given.prompts), "--answer-tokens", answer)
        for one in asked(url, *words, *warmth):
            number = one["level"].partition(" ")[0]  # of "4 streams"
            usual, _, late = one["inter_token_ms"]
            level = {"tok/s": one["tokens_s"], "next token p50, ms": usual, "p99, ms": late}
            level["first token p50, ms"] = one["first_token_ms"][0]
            found |= {f"{number}: {name}": value for name, value in level.items()}
            found[f"{number}: unanswered"] = one["requests"] - one["answered"]
        found["memory, MB"] = memory()
    with listening(command, server.tree, home) as (_, found["ready again, s"]):
        pass
    with listening(server.command(given.slots, max(lengths) + given.answers + MARGIN), server.tree, home) as (url, _):
        for length in lengths:
            [one] = asked(url, "--requests", "3", "--prompt-tokens", str(length), "--answer-tokens", answer, *warmth)
            found[f"first behind {length}, ms"] = one["first_token_ms"][0]
            found[f"then, tok/s ({length})"] = one["stream_tokens_s"][0]
    return found


def bf16(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """As `packed` has it, sooner: many gigabytes of it."""
    if data.ndim == 1:
        return packed(name, data, kind)
    return torch.from_numpy(data).bfloat16().view(torch.uint8).numpy(), Kind.BF16


def servers(given: argparse.Namespace, folder: Path) -> dict[str, Contender]:
    model = given.file or (DEMO if given.shape == "demo" else folder / "model")
    if not model.exists():
        checkpoint(model, argparse.Namespace(shape=given.shape, layers=given.layers))

    def ours(*more: str) -> Callable[[int, int], list[str]]:
        def command(slots: int, rows: int) -> list[str]:
            room = () if given.shape == "demo" else ("--slots", str(slots), "--max-ctx", str(rows))
            return [sys.executable, "-m", "engine", "serve", str(model), *room, *more]

        return command

    found = dict[str, Contender]()
    for name, tree in (("ours", ROOT), ("before", given.before)):
        if tree is not None:
            found[name] = Contender(ours("--draft", "none"), tree)
            if model == DEMO:
                found[f"{name}, draft"] = Contender(ours(), tree)
    if given.llama is not None:
        file, threads = given.file or folder / "model.gguf", str(torch.get_num_threads())
        if not file.exists():
            write_gguf(file, model, Kind.BF16, tokenizer="smollm", pack=bf16)
        device = ("-ngl", "99") if torch.cuda.is_available() else ("-t", threads)
        how = (str(given.llama), "-m", str(file), "-fa", "on", "--cache-ram", "0", *device)
        found["llama.cpp"] = Contender(lambda slots, rows: [*how, "-np", str(slots), "-c", str(slots * rows)], ROOT)
    return found


LATE = 1.5  # times the median: the goal of the latest one percent of tokens


def make_figures(found: Mapping[str, Mapping[str, float]], subject: str, given: argparse.Namespace) -> list[Figure]:
    """Compare the first server, which is ours, with the others. It must be ahead of llama.cpp in each figure."""
    (_, ours), *others = found.items()
    made = list[Figure]()

    def add(promise: str, what: str, at: str, unit: str, name: str) -> None:
        peers = {peer: figures[name] for peer, figures in others}
        if given.file and promise != "start":
            promise = "packed"
        goal = None
        if "llama.cpp" in peers:
            goal = Goal(at_least=1, against="llama.cpp") if unit == "tok/s" else Goal(at_most=1, against="llama.cpp")
        made.append(Figure(promise, f"{subject}, {what}", at, unit, ours[name], peers, goal))

    lengths, levels = given.lengths.split(","), given.levels.split(",")
    for length in lengths:
        add("cold", "first token", length, "ms", f"first behind {length}, ms")
    for length in lengths:
        add("decode", "behind", length, "tok/s", f"then, tok/s ({length})")
    for what, unit, name in (
        (f"streams of {given.prompts} tokens, together", "tok/s", "tok/s"),
        ("next token p50", "ms", "next token p50, ms"),
        ("next token p99", "ms", "p99, ms"),
        ("streams, first token p50", "ms", "first token p50, ms"),
    ):
        for level in levels:
            add("streams", what, level, unit, f"{level}: {name}")
    late, usual = (ours[f"{levels[-1]}: {name}"] for name in ("p99, ms", "next token p50, ms"))
    what = f"{subject}, next token p99 over p50"
    made.append(Figure("streams", what, levels[-1], "x", late / usual, goal=Goal(at_most=LATE)))
    add("start", "ready, the same command again", "second", "s", "ready again, s")
    add("memory", "host memory", "served", "MB", "memory, MB")
    return made


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--file", type=Path, help="a GGUF file in the place of the demo, which both serve")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument("--folder", type=Path, help="where random weights are written, and kept")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--levels", default="1,4,16")
    parser.add_argument("--lengths", default="512,2048,7800")
    parser.add_argument("--prompts", type=int, default=256, help="tokens of the levels' prompts")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--slots", type=int, default=2, help="of the server that is asked the lengths")
    parser.add_argument("--only-write", action="store_true", help="the weights, and nothing is asked")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        asked_ones = servers(given, folder)
        if given.only_write:
            return
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in asked_ones}
        for _ in range(given.rounds):
            for name, server in asked_ones.items():
                home = Path(scratch) / name
                home.mkdir(exist_ok=True)
                rounds[name].append(figures(server, home, given))
                print(name, {what: round(value, 2) for what, value in rounds[name][-1].items()}, flush=True)
    found = {name: {what: median(one[what] for one in runs) for what in runs[0]} for name, runs in rounds.items()}
    first = next(iter(found.values()))
    print_table("medians", [{"": what, **{name: one[what] for name, one in found.items()}} for what in first])
    subject = given.file.stem if given.file else name_shape(given.shape)
    device = "auto" if given.shape != "demo" else "cpu"
    publish(given, f"peer-{slug(subject)}", {"rounds": rounds}, make_figures(found, subject, given), device)


if __name__ == "__main__":
    main()
