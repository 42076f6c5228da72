"""Measures what a draft gains over a server's life, over HTTP: answers one after the other, each plainly and with the
draft.

    python -m benchmarks.speculation_served [--subjects code] [--prompts 24] [--temperature 0.8] [--before CHECKOUT]
        [--rounds 2] [--record] [-- OPTIONS OF serve]

`benchmarks.speculation` has an engine of its own for each answer, as the first answer of a new server is served. Here a
server learns from every answer what a draft gains and costs, and a loss of one answer leaves less for the next ones. A
round has one server of each checkout. The two answers of a prompt come first in turn. The time counts from the first
words of a stream to the last. The exit status is 1 where an answer differs with the draft.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.peer_servers import ROOT, listen_to
from benchmarks.results import Figure, publish
from benchmarks.subjects import NAMES, prompts
from benchmarks.tables import median, print_table
from effects.ids import Tokens

LONGEST, ANSWER, TOP_P = 512, 192, 0.95


@frozen
class Streamed:
    """seconds: between its first words and its last."""

    text: str
    tokens: int
    seconds: float
    decode_steps: int


def stream_answer(client: httpx.Client, prompt: Tokens, seed: int, temperature: float, speculation: str) -> Streamed:
    body = {"prompt": list(prompt), "max_tokens": ANSWER, "temperature": temperature, "top_p": TOP_P, "seed": seed}
    how = {"speculation": speculation, "prefix_cache": {"scope": "off"}}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text, times, last = "", list[float](), dict[str, Any]()
    with client.stream("POST", "/v1/completions", json=body | how | options) as answer:
        for line in answer.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                if piece["choices"] and piece["choices"][0]["text"]:
                    times.append(time.perf_counter())
                    text += piece["choices"][0]["text"]
                last = piece if piece.get("usage") else last
    took = times[-1] - times[0] if times else 0.0
    return Streamed(text, last["usage"]["completion_tokens"], took, last["rekindle"]["speculation"]["rounds"])


def one_server(tree: Path, subject: str, asked: Sequence[Tokens], given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "engine", "serve", given.model, "--disk-prefix-cache", "off", *given.options]
    found: dict[str, list[Streamed]] = {"off": [], "auto": []}
    with tempfile.TemporaryDirectory() as home, listen_to(command, tree, given.home or Path(home)) as (url, _):
        client = httpx.Client(base_url=url, timeout=600)
        for number, prompt in enumerate(asked):
            for way in ("off", "auto") if number % 2 else ("auto", "off"):
                found[way].append(stream_answer(client, prompt, number, given.temperature, way))
    seconds = {way: sum(one.seconds for one in answers) for way, answers in found.items()}
    tokens = sum(one.tokens for one in found["off"])
    pairs = [one.seconds / max(other.seconds, 1e-9) for one, other in zip(found["off"], found["auto"], strict=True)]
    return {
        "tree": tree.name,
        "subject": subject,
        "plain tok/s": tokens / seconds["off"],
        "drafted tok/s": tokens / seconds["auto"],
        "x": seconds["off"] / seconds["auto"],
        "median x": median(pairs),
        "least x": min(pairs),
        "tokens a round": tokens / sum(one.decode_steps for one in found["auto"]),
        "differing": sum(one.text != other.text for one, other in zip(found["off"], found["auto"], strict=True)),
    }


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--subjects", default="code", help="of " + ", ".join(NAMES))
    parser.add_argument("--prompts", type=int, default=24, help="of each subject")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--before", type=Path, help="another checkout, to be compared with")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--home", type=Path, help="where servers keep what they measured (default: each start anew)")
    parser.add_argument("options", nargs="*", help="of `rekindle serve`")
    given = parser.parse_args()
    trees = [ROOT, *([given.before.resolve()] if given.before else [])]
    rows = list[dict[str, Any]]()
    for number in range(given.rounds):
        for subject, asked in prompts(given.subjects.split(","), given.prompts, LONGEST).items():
            for tree in trees if number % 2 else trees[::-1]:
                rows.append(one_server(tree, subject, asked, given))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_table("drafted and plain answers, one after the other", rows)
    own = {
        subject: [row["x"] for row in rows if row["subject"] == subject and row["tree"] == ROOT.name]
        for subject in given.subjects.split(",")
    }
    what = "demo with its draft over HTTP, sampled"
    figures = [Figure("speculation", what, subject, "x", median(times)) for subject, times in own.items()]
    publish(given, "speculation_served", {"rows": rows, "load": os.getloadavg()}, figures)
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
