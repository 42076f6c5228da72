"""An agent's conversation of some turns: without a cache, with the prefix cache, frozen, and both at once.

The log has flat prompts, each the one before it and what the agent was shown since; `messages` splits them. Answers are
those of the log, so that all servers read the same conversation; what a server itself says is timed and thrown away.
The servers take turns, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from adapters import demo
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from tests.e2e.server import Running, serving

KINDS = NOTHING, CACHE, FROZEN, BOTH = "neither", "prefix cache", "frozen", "both"
SUMS = ("computed", "scoring_ms", "prompt_ms", "wall_ms", "processor_ms")
ELSE = "Something else altogether. " * 60  # takes the one slot over, so that nothing of the conversation is left in it
Turn = Mapping[str, float]


def make_figures(rows: Mapping[str, list[list[Turn]]]) -> list[Figure]:
    """Compare the processor time of both layers together with the better one of them."""
    spent = {name: min(sum(turn["processor_ms"] for turn in turns) for turns in runs) for name, runs in rows.items()}
    single = [spent[name] for name in (CACHE, FROZEN) if name in spent]
    if BOTH not in spent or not single:
        return []
    peers, goal = {"best single layer": min(single)}, Goal(at_most=1.05, against="best single layer")
    return [
        Figure("compression", "an agent's session, cache and freezing", "processor", "ms", spent[BOTH], peers, goal)
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("log", type=Path, help="JSON Lines: timestamp, input, output of one session")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default=str(demo.DRAFTER))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--answer", type=int, default=64, help="tokens that each server says in a turn")
    parser.add_argument("--mode", choices=("auto", "always"), default="auto")
    parser.add_argument("--threshold", type=int, default=1000, help="tokens of aged messages that are frozen at once")
    parser.add_argument("--max-ctx", type=int, default=0, help="0: the model's own")
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    how = parser.parse_args()
    rows = dict[str, list[list[Turn]]]()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(how.model, *options(name, how, stack))) for name in how.kinds}
        for run in range(how.runs):
            answers = conversation(servers, messages(how.log, how.turns), how, run)
            for name, turns in answers.items():
                rows.setdefault(name, []).append(turns)
    show(rows)
    publish(how, "freezing", {"turns": rows}, make_figures(rows))


def options(name: str, how: argparse.Namespace, stack: ExitStack) -> list[str]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    words = ["--slots", "1", "--max-ctx", str(how.max_ctx), "--kv-cache-dir", folder, "--kv-cache-min-tokens", "64"]
    if name in {NOTHING, FROZEN}:
        words += ["--host-cache-budget", "0", "--disk-prefix-cache", "1"]  # of which no block is whole
    if name in {FROZEN, BOTH}:
        words += ["--disk-prefix-cache-compress", "--prefill-compression", how.mode, "--prefill-drafter", how.drafter]
        words += ["--prefill-threshold", str(how.threshold), "--prefill-keep-ratio", str(how.keep)]
    return words


def messages(log: Path, turns: int) -> list[dict[str, str]]:
    """Return the conversation of a log: the first question, then in turns what the agent said and what it was shown."""
    lines = sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda line: line["timestamp"])
    found, before = list[dict[str, str]](), ""
    for line in lines[:turns]:
        asked = line["input"]
        assert asked.startswith(before), "a log whose prompts do not grow"
        found.append({"role": "user", "content": asked.removeprefix(before).strip()})
        found.append({"role": "assistant", "content": line["output"]})
        before = asked
    return found[:-1]


def conversation(
    servers: Mapping[str, Running], said: Sequence[Mapping[str, str]], how: argparse.Namespace, run: int
) -> dict[str, list[Turn]]:
    head = {**said[0], "content": f"{run}. {said[0]['content']}"}  # nothing of an earlier run is found
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    for stop in range(1, len(said) + 1, 2):
        turned = list(servers.items())[stop // 2 % len(servers) :] + list(servers.items())[: stop // 2 % len(servers)]
        for name, server in turned:
            if name in {NOTHING, FROZEN}:
                server.chat(f"{run} {stop} {ELSE}", max_tokens=1)
            turns[name].append(ask_server(server, [head, *said[1:stop]], how.answer))
    return turns


def ask_server(server: Running, sent: Sequence[Mapping[str, str]], answer: int) -> Turn:
    body = {"messages": sent, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "speculation": "off"}
    start, spent = time.perf_counter(), processor_s(server)
    response = server.client.post("/v1/chat/completions", json=body)
    took, spent = time.perf_counter() - start, processor_s(server) - spent
    if response.json().get("error", {}).get("code") == "context_length_exceeded":
        return dict.fromkeys(
            ("served", "found", "computed", "scoring_ms", "prompt_ms", "wall_ms", "processor_ms"), 0.0
        ) | {"sent": -1}
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    compression = answer["rekindle"]["compression"] or {}
    served = compression.get("kept_tokens") or answer["usage"]["prompt_tokens"]
    found = answer["rekindle"]["restored_tokens"]
    prefill = sum(ms for stage, ms in answer["rekindle"]["stages_ms"].items() if stage != "Speculating")
    return {
        "sent": answer["usage"]["prompt_tokens"],
        "served": served,
        "found": found,
        "computed": served - found,
        "scoring_ms": compression.get("time_ms", 0.0),
        "prompt_ms": round(prefill, 1),
        "wall_ms": round(1e3 * took, 1),
        "processor_ms": round(1e3 * spent, 1),
    }


def processor_s(server: Running) -> float:
    """Return the seconds of processor time that the server's process has taken so far. Other programs change them
    little.
    """
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(rows: Mapping[str, list[list[Turn]]]) -> None:
    for name, runs in rows.items():
        print(f"{name}: sent/served/found of each turn of the first run")
        print("  " + "  ".join(f"{turn['sent']}/{turn['served']}/{turn['found']}" for turn in runs[0]))
    print(f"{'':14}" + "".join(f"{name:>13}" for name in SUMS) + "   found after turn 3 (of what is served)")
    for name, runs in rows.items():
        best = min(runs, key=lambda turns: sum(turn["processor_ms"] for turn in turns))
        late = best[3:]
        share = sum(turn["found"] for turn in late) / max(1.0, sum(turn["served"] for turn in late))
        hits = sum(turn["found"] > 0 for turn in late)
        sums = "".join(f"{sum(turn[one] for turn in best):>13,.0f}" for one in SUMS)
        print(f"{name:14}{sums}   {hits} of {len(late)} turns, {share:.1%}")


if __name__ == "__main__":
    main()
