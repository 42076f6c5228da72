"""Asks servers that run at the same time, for `benchmarks.peer --together`.

Every question is asked of all servers, one after the other, before the next question comes. So a machine that becomes
warmer or slower meanwhile does the same to all of them. Each answer is printed when it is there, because a run may be
ended before it is complete. Rounds begin with the first and the last server in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

from benchmarks.agents_load import run_agents
from benchmarks.peer_load import ask_length, ask_level, make_workload, parse_numbers
from benchmarks.peer_servers import POLL_S, Contender, start_all

MARGIN = 256  # rows that what is sent may take besides
Figures: TypeAlias = dict[str, float]
Rounds: TypeAlias = dict[str, list[Figures]]  # of each server


@frozen
class PeerQuestion:
    """What all servers are asked alike. ask: takes a server's address and a round's seed, returns figures by name."""

    name: str
    ask: Callable[[str, int], Figures]


def list_questions(given: argparse.Namespace) -> Iterator[PeerQuestion]:
    """List the questions of one round, in the order of --parts, --lengths and --levels."""
    for part in given.parts.split(","):
        if part == "agents":
            yield PeerQuestion(f"{given.sessions} sessions", partial(ask_agents, given=given))
        elif part == "cold":
            for length in parse_numbers(given.lengths):
                yield PeerQuestion(f"cold prompts of {length}", partial(ask_cold_length, length=length, given=given))
        else:
            for level in parse_numbers(given.levels):
                yield PeerQuestion(f"{level} streams", partial(ask_stream_level, level=level, given=given))


def ask_agents(url: str, seed: int, given: argparse.Namespace) -> Figures:
    return run_agents(url, make_workload(given), seed).compute_figures()


def ask_cold_length(url: str, _: int, length: int, given: argparse.Namespace) -> Figures:
    return ask_length(url, length, given)


def ask_stream_level(url: str, _: int, level: int, given: argparse.Namespace) -> Figures:
    return ask_level(url, level, given)


def compute_size(given: argparse.Namespace) -> tuple[int, int]:
    """Return the sequences and the rows of each that the parts need."""
    sequences = max(parse_numbers(given.levels))
    longest = max(given.prompts, *parse_numbers(given.lengths)) + given.answers
    if "agents" in given.parts.split(","):
        workload = make_workload(given)
        sequences, longest = max(sequences, workload.sessions), max(longest, workload.longest)
    return sequences, longest + MARGIN


def measure_together(servers: Mapping[str, Contender], scratch: Path, given: argparse.Namespace) -> Rounds:
    """Return the figures of each server and round. Servers start at the same moment and stay there.

    After --limit seconds no further question is asked, and Ctrl-C ends the one that is being asked. The figures are
    then those of the questions before.
    """
    found: Rounds = {name: [] for name in servers}
    started = time.monotonic()
    try:
        with start_all(servers, *compute_size(given), scratch) as urls:
            print("ready", {name: round(ready, 2) for name, (_, ready) in urls.items()}, flush=True)
            while given.wait_for and not given.wait_for.exists():
                time.sleep(POLL_S)
            ask_rounds(urls, given, found, started)
    except KeyboardInterrupt:  # also one that comes while the servers end
        print("interrupted: these are the figures so far", flush=True)
    return found


def ask_rounds(urls: Mapping[str, tuple[str, float]], given: argparse.Namespace, found: Rounds, started: float) -> None:
    """Ask all questions of all rounds and add the figures to `found`. started: a time of the monotonic clock."""
    seed = time.time_ns()
    for number in range(given.rounds):
        names = list(urls)[:: -1 if number % 2 else 1]
        for name in names:
            found[name].append({"ready, s": urls[name][1]})
        for question in list_questions(given):
            if time.monotonic() - started > given.limit:
                print(f"no time left for {question.name}, round {number + 1}", flush=True)
                return
            for name in names:
                figures = question.ask(urls[name][0], seed + number)
                print_found(f"{time.monotonic() - started:.0f} s, {name}", figures)
                found[name][-1] |= figures


def print_found(name: str, found: Mapping[str, float]) -> None:
    print(name, {what: round(value, 2) for what, value in found.items()}, flush=True)
