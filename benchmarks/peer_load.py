"""What `benchmarks.peer` asks of a server that runs: levels of streams, cold prompts of several lengths, and agents."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.agents_load import Workload
from benchmarks.peer_servers import ROOT, measure_memory
from engine.tools.bench.bench_options import parse_lengths

FEWEST_REQUESTS = 4  # of a level, where --requests is given
MEMORY = "memory, MB"  # the figure of what all servers that run have in host memory


def run_bench_serve(url: str, *words: str) -> list[Mapping[str, Any]]:
    command = [sys.executable, "-m", "engine", "bench", "serve", "--url", url, "--json", *words]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: some requests failed, which the figures say
        raise SystemExit(done.stderr[-2000:])
    found: list[Mapping[str, Any]] = json.loads(done.stdout)["levels"]
    check_texts(url, found)
    return found


def check_texts(url: str, levels: Sequence[Mapping[str, Any]]) -> None:
    """Check that text came, so that there are times. Ends the program with what the server did otherwise.

    A server that answers with control tokens alone sends no text: they have none. Weights that make every number of a
    model zero or NaN have that effect, because the largest logit is then that of token 0.
    """
    for one in levels:
        if one["first_token_ms"] is None or one["inter_token_ms"] is None:
            errors = "; ".join(f"{count} x {error}" for error, count in one["errors"].items()) or "none"
            raise SystemExit(
                f"{url}: {one['level']}: no answer has two pieces of text. Errors: {errors}. "
                f"Tokens that the server counted: {one['answer_tokens']}"
            )


def parse_numbers(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split(",")))


def ask_streams(url: str, given: argparse.Namespace) -> dict[str, float]:
    """Return the figures of all levels, of a server that runs."""
    found = dict[str, float]()
    for level in parse_numbers(given.levels):
        found |= ask_level(url, level, given)
    return found | {MEMORY: measure_memory()}


def ask_level(url: str, level: int, given: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one level. level: streams at once."""
    words = ["--prompt-tokens", str(given.prompts), "--answer-tokens", str(given.answers)]
    words += ["--temperature", given.temperature, "--concurrency", str(level)]
    if given.requests:
        words += ["--requests", str(max(FEWEST_REQUESTS, given.requests * level))]
    return read_levels(run_bench_serve(url, *words))


def read_levels(levels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = dict[str, float]()
    for one in levels:
        number = one["level"].partition(" ")[0]  # of "4 streams"
        usual, _, late = one["inter_token_ms"]
        level = {"tok/s": one["tokens_s"], "next token p50, ms": usual, "p99, ms": late}
        level["first token p50, ms"] = one["first_token_ms"][0]
        found |= {f"{number}: {name}": value for name, value in level.items()}
        found[f"{number}: unanswered"] = one["requests"] - one["answered"]
    return found


def ask_cold(url: str, given: argparse.Namespace) -> dict[str, float]:
    found = dict[str, float]()
    for length in parse_numbers(given.lengths):
        found |= ask_length(url, length, given)
    return found


def ask_length(url: str, length: int, given: argparse.Namespace) -> dict[str, float]:
    """Return the figures of single prompts that no cache knows. length: their tokens."""
    words = ("--requests", "3", "--answer-tokens", str(given.answers), "--temperature", given.temperature)
    [one] = run_bench_serve(url, *words, "--prompt-tokens", str(length))
    return {
        f"first behind {length}, ms": one["first_token_ms"][0],
        f"then, tok/s ({length})": one["stream_tokens_s"][0],
    }


def make_workload(given: argparse.Namespace) -> Workload:
    ranges = parse_lengths(given.tool_results), parse_lengths(given.agent_answers)
    return Workload(given.sessions, given.turns, given.head, *ranges)
