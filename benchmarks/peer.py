"""Compares a model over HTTP with llama.cpp's server, with vLLM, and with ourselves at another checkout, in turn.

    python -m benchmarks.peer [--llama LLAMA-SERVER] [--before CHECKOUT] [--rounds 2] [--levels 1,4,16]
    python -m benchmarks.peer --file MODEL.gguf [--shape 8b] --llama LLAMA-SERVER --levels 1,4
    python -m benchmarks.peer --shape 8b --llama LLAMA-SERVER --levels 1,8,32 --lengths 2048,8192,32768 [--folder DIR]
    python -m benchmarks.peer --shape 8b --vllm PYTHON [--vllm-path FOLDERS] [--vllm-exact] --parts agents,restart

Parts (--parts) are what every server is asked alike, of prompts that were never sent before:
* `streams`: the levels, by `rekindle bench serve`, and how soon the server is ready, at first and once more;
* `cold`: first tokens behind prompts of several lengths, and the pace of the answers;
* `agents`: sessions that begin at the same moment and have one head (`benchmarks.agents_load`);
* `restart`: first tokens of the same prompts again, once the server has ended and another one has started.

llama.cpp's server comes from the sdist of `llama-cpp-python` (`cmake --build BUILD --target llama-server` in its
vendor/, with `-DGGML_CUDA=ON` for a GPU). The weights are written as a GGUF file of bf16 for it, or both serve the file
of --file. vLLM is started by the interpreter of --vllm, and may be unpacked in folders that --vllm-path names; it loads
the same folder as we do. --vllm-exact adds it once more in the mode where its answers do not depend on batches. 8b
means random weights of an 8B model's shape, on CUDA, and files in DIR are used again. hybrid-27b is the shape of
Qwen3.5's 27B: our server draws the weights when it starts (`benchmarks.hybrid`), and vLLM has dummy weights of its own,
once it accepts a Qwen3-Next without experts (`peer_models.make_hybrid_servers`). Shapes of `benchmarks.family_speeds`
are drawn alike. --cpu-experts leaves the experts of the first layers in host memory, where our server and llama.cpp's
compute them. --packing writes the 8b shape packed (`benchmarks.packed_folders`). With --together all servers share
the device, and one at a time is asked (`benchmarks.peer_together`): vLLM then needs
`--vllm-flags=--kv-cache-memory-bytes=BYTES`, and our server with --defaults `--flags=--kv-memory=MIB`, as neither may
take the rest of the memory. Our server has as many slots as a part needs, as long as they must be, and no draft. With
--defaults it has what a plain `rekindle serve` has, and copies of earlier text are proposed. "memory" is what a server
and its processes have in memory in the end, each with its share of common pages. "ready again" is the same command once
more, when our server finds what the first one kept. Another checkout needs its products compiled (`python
hatch_build.py`). Figures are medians of rounds. All of them need the machine for themselves.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.agents_load import ask_in_turn, run_agents
from benchmarks.arguments import benchmark_parser
from benchmarks.cold import forget
from benchmarks.first_requests import SHAPES
from benchmarks.packed_files import SPARSE
from benchmarks.packed_folders import LISTERS
from benchmarks.peer_load import MEMORY, ask_cold, ask_streams, make_workload, parse_numbers
from benchmarks.peer_models import DRAWN, FAMILIES, HYBRID, make_servers, name_subject
from benchmarks.peer_servers import Contender, listen
from benchmarks.peer_together import MARGIN, Rounds, compute_size, measure_together, print_found
from benchmarks.results import Figure, Goal, publish, slug
from benchmarks.tables import median, print_table
from engine.tools.bench.bench_prompts import LoadPrompt, draw_tokens, make_random

PARTS = ("streams", "cold", "agents", "restart")
# First tokens that may come later than a peer's, by this factor: of a shape, at a length (None: at any).
ALLOWED = {("8b", 32_768): 1.03, (HYBRID, None): 1.05} | {(family, None): 1.1 for family in FAMILIES}


def measure_streams(server: Contender, home: Path, given: argparse.Namespace) -> dict[str, float]:
    found = dict[str, float]()
    sequences, rows = max(parse_numbers(given.levels)), given.prompts + given.answers + MARGIN
    with listen(server, sequences, rows, home) as (url, found["ready, s"]):
        found |= ask_streams(url, given)
    with listen(server, sequences, rows, home) as (_, found["ready again, s"]):
        pass
    return found


def measure_cold(server: Contender, home: Path, given: argparse.Namespace) -> dict[str, float]:
    longest = max(parse_numbers(given.lengths)) + given.answers + MARGIN
    with listen(server, given.slots, longest, home) as (url, _):
        return ask_cold(url, given)


def measure_once(server: Contender, home: Path, given: argparse.Namespace) -> dict[str, float]:
    """Measure the streams and the cold prompts of one server, which is started once."""
    found = dict[str, float]()
    with listen(server, *compute_size(given), home) as (url, found["ready, s"]):
        return found | ask_streams(url, given) | ask_cold(url, given)


def measure_in_turn(servers: Mapping[str, Contender], scratch: Path, given: argparse.Namespace) -> Rounds:
    """Measure all parts of each server, of which one runs at a time."""
    rounds: Rounds = {name: [] for name in servers}
    for _ in range(given.rounds):
        for name, server in servers.items():
            home = scratch / name
            home.mkdir(exist_ok=True)
            found = dict[str, float]()
            for measure in [measure_once] if given.once else [MEASURES[part] for part in given.parts.split(",")]:
                found |= measure(server, home, given)
            rounds[name].append(found)
            print_found(name, found)
    return rounds


def measure_agents(server: Contender, home: Path, given: argparse.Namespace) -> dict[str, float]:
    workload = make_workload(given)
    with listen(server, workload.sessions, workload.longest + MARGIN, home) as (url, _):
        return run_agents(url, workload, time.time_ns()).compute_figures()


def measure_restart(server: Contender, home: Path, given: argparse.Namespace) -> dict[str, float]:
    """The first server ends by itself, so it has written what it keeps. Its files are then out of the page cache."""
    found = dict[str, float]()
    lengths = parse_numbers(given.lengths)
    draw = make_random(str(time.time_ns()))
    prompts = [LoadPrompt(draw_tokens(draw, length), 16) for length in lengths]
    rows = max(lengths) + MARGIN
    for name in ("before", "after"):
        forget([file for file in home.rglob("*") if file.is_file()])
        with listen(server, given.slots, rows, home) as (url, _):
            for length, sample in zip(lengths, ask_in_turn(url, prompts), strict=True):
                found[f"restart: first behind {length}, {name}, ms"] = 1e3 * (sample.first or 0.0)
                found[f"restart: tokens found {name} ({length})"] = sample.cached or 0
    return found


MEASURES = {"streams": measure_streams, "cold": measure_cold, "agents": measure_agents, "restart": measure_restart}


LATE = 1.5  # times the median: the goal of the latest one percent of tokens
HIGHER_IS_BETTER = {"tok/s", "%"}
# What is compared: promise, subject, place, unit, and the name of the figure.
Row: TypeAlias = tuple[str, str, str, str, str]


def sort_numbers(words: str) -> list[str]:
    """Return the numbers of an option in ascending order, in which figures are shown."""
    return [str(number) for number in sorted(parse_numbers(words))]


def list_stream_rows(given: argparse.Namespace) -> list[Row]:
    kinds = (
        (f"streams of {given.prompts} tokens, together", "tok/s", "tok/s"),
        ("next token p50", "ms", "next token p50, ms"),
        ("next token p99", "ms", "p99, ms"),
        ("streams, first token p50", "ms", "first token p50, ms"),
    )
    rows = [
        ("streams", what, level, unit, f"{level}: {name}")
        for what, unit, name in kinds
        for level in sort_numbers(given.levels)
    ]
    if not (given.once or given.together):
        rows.append(("start", "ready, the same command again", "second", "s", "ready again, s"))
    if not given.together:
        rows.append(("memory", "host memory", "served", "MB", MEMORY))
    return rows


def list_cold_rows(given: argparse.Namespace) -> list[Row]:
    lengths = sort_numbers(given.lengths)
    rows = [("cold", "first token", length, "ms", f"first behind {length}, ms") for length in lengths]
    return rows + [("decode", "behind", length, "tok/s", f"then, tok/s ({length})") for length in lengths]


def list_agents_rows(given: argparse.Namespace) -> list[Row]:
    sessions = f"{given.sessions} sessions"
    first, later = "first token of the first turn", "first token of later turns"
    rows = [
        ("agents", f"{sessions} that begin together", "whole run", "s", "agents: whole run, s"),
        ("agents", first, "p50", "s", f"agents: {first} p50, s"),
        ("agents", "prompt tokens found", sessions, "%", "agents: found, %"),
    ]
    return rows + [("agents", later, at, "s", f"agents: {later} {at}, s") for at in ("p50", "p95") if given.turns > 1]


def list_restart_rows(given: argparse.Namespace) -> list[Row]:
    what = "first token after a restart"
    lengths = sort_numbers(given.lengths)
    return [("restart", what, length, "ms", f"restart: first behind {length}, after, ms") for length in lengths]


ROWS = {"streams": list_stream_rows, "cold": list_cold_rows, "agents": list_agents_rows, "restart": list_restart_rows}


def make_figures(found: Mapping[str, Mapping[str, float]], subject: str, given: argparse.Namespace) -> list[Figure]:
    """Compare the first server, which is ours, with the others. It must be ahead of every other product's."""
    (_, ours), *others = found.items()
    rival = next((peer for peer in ("vLLM", "llama.cpp") if peer in found), None)
    made = list[Figure]()
    for part in given.parts.split(","):
        for promise, what, at, unit, name in ROWS[part](given):
            if not all(name in figures for figures in found.values()):
                # --limit came before it.
                continue
            goal = None
            if rival is not None:
                most = find_allowed(given.shape, at) if promise == "cold" else 1
                goal = (
                    Goal(at_least=1, against=rival) if unit in HIGHER_IS_BETTER else Goal(at_most=most, against=rival)
                )
            peers = {peer: figures[name] for peer, figures in others}
            shown = choose_promise(promise, given)
            made.append(Figure(shown, f"{subject}, {what}", at, unit, ours[name], peers, goal))
    level = sort_numbers(given.levels)[-1]
    if f"{level}: p99, ms" in ours:
        late, usual = (ours[f"{level}: {name}"] for name in ("p99, ms", "next token p50, ms"))
        what = f"{subject}, next token p99 over p50"
        made.append(Figure("streams", what, level, "x", late / usual, goal=Goal(at_most=LATE)))
    return made


def choose_promise(promise: str, given: argparse.Namespace) -> str:
    """Return the promise under which a figure is shown. Hybrids and packed weights have tables of their own."""
    if given.shape == HYBRID:
        return "hybrid"
    return "packed" if (given.file or given.packing) and promise != "start" else promise


def find_allowed(shape: str, length: str) -> float:
    return ALLOWED.get((shape, int(length)), ALLOWED.get((shape, None), 1))


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", default="streams,cold", help="of " + ", ".join(PARTS))
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--vllm", default="", help="the interpreter that starts vLLM, for instance python")
    parser.add_argument("--vllm-path", default="", help="PYTHONPATH of vLLM, where it is unpacked in folders")
    parser.add_argument("--vllm-flags", default="", help="further options of its server")
    parser.add_argument("--vllm-exact", action="store_true", help="it runs batch-invariant as well, as one more server")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--flags", default="", help="further options of our server")
    parser.add_argument("--defaults", action="store_true", help="our server has no options but those of --flags")
    parser.add_argument("--shape", choices=["demo", *DRAWN, *SHAPES, *SPARSE], default="demo")
    parser.add_argument("--file", type=Path, help="a GGUF file in the place of the demo, which both serve")
    parser.add_argument(
        "--cpu-experts", type=int, default=0, help="layers whose experts ours and llama.cpp compute on the CPU"
    )
    parser.add_argument("--packing", choices=LISTERS, default="", help="weights are written packed")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument("--folder", type=Path, help="where random weights are written, and kept")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--levels", default="1,4,16")
    parser.add_argument("--lengths", default="512,2048,7800")
    parser.add_argument("--prompts", type=int, default=256, help="tokens of the levels' prompts")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, default=0, help="of each stream, at least 4 a level; default: 4, at least 8"
    )
    parser.add_argument("--once", action="store_true", help="start each server once, for the parts streams and cold")
    parser.add_argument("--together", action="store_true", help="start all servers at once, and ask them in turn")
    parser.add_argument("--wait-for", type=Path, help="with --together, ask nothing before this file is there")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="with --together, seconds after which nothing more is asked"
    )
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--slots", type=int, default=2, help="of the server that is asked the lengths")
    parser.add_argument("--sessions", type=int, default=16, help="agents that begin together")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--head", type=int, default=8000, help="tokens that all sessions share")
    parser.add_argument("--tool-results", default="300-2500")
    parser.add_argument("--agent-answers", default="60-300")
    parser.add_argument("--only-write", action="store_true", help="the weights, and nothing is asked")
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; accepted: {', '.join(PARTS)}")
    if given.once and set(given.parts.split(",")) != {"streams", "cold"}:
        parser.error("--once: for --parts streams,cold")
    if given.together and "restart" in given.parts.split(","):
        parser.error("--together: without --parts restart")
    if given.packing and (given.file or given.llama or given.shape not in SHAPES):
        parser.error(f"--packing: for --shape {', '.join(SHAPES)}, without --file and --llama")
    if given.shape in DRAWN and (given.llama or given.file):
        parser.error(f"--shape {given.shape}: weights are drawn; without --llama and --file")
    if given.shape in SPARSE and not given.file:
        parser.error(f"--shape {given.shape}: with --file, which `benchmarks.packed_files` writes")
    if given.vllm and given.file:
        parser.error("--file: vLLM serves a folder of safetensors, not a GGUF file")
    return given


def take_medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure. A round that --limit ended has fewer figures than the first one."""
    return {what: median(one[what] for one in rounds if what in one) for what in rounds[0]}


def main() -> None:
    given = parse_options()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        servers = make_servers(given, folder)
        if given.only_write:
            return
        versions = {name: server.find_version() for name, server in servers.items() if server.version}
        measure = measure_together if given.together else measure_in_turn
        rounds = measure(servers, Path(scratch), given)
    medians = {name: take_medians(runs) for name, runs in rounds.items()}
    first = next(iter(medians.values()))
    shared = [what for what in first if all(what in one for one in medians.values())]
    print_table("medians", [{"": what, **{name: one[what] for name, one in medians.items()}} for what in shared])
    subject = name_subject(given)
    device = "auto" if given.shape != "demo" else "cpu"
    raw = {"rounds": rounds, "versions": versions}
    name = f"peer-{slug(subject)}" + ("-vllm" if given.vllm else "")
    publish(given, name, raw, make_figures(medians, subject, given), device)


if __name__ == "__main__":
    main()
