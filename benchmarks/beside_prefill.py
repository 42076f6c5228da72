"""Measures how a long prompt of one client disturbs the streams of others: the time between tokens over HTTP, before
the prompt and while it is read.

    python -m benchmarks.beside_prefill [--streams 10] [--prompt 8192] [--model demo] [-- OPTIONS]

Every stream generates until it is stopped. After some seconds a prompt that is new to the server is sent, and answered
with one token. A gap lies between two messages of one stream that bring text, and counts for the time in which it ends.
All the while another client asks for /health, fifty times a second, and this measures how soon the HTTP loop answers.

Goals: p99 at most three times p50, of all gaps; p99 of /health at most 20 ms.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table
from tests.e2e.server import Running, serving

ALONE_S = 10.0  # streams without the prompt
WORDS = ("shapes", "have", "sides", "and", "each", "side", "a", "length", "that", "somebody", "measured", "once")


class Streaming(threading.Thread):
    """One stream. times: when messages with text came."""

    def __init__(self, server: Running, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.number, self.stop = server, number, stop
        self.times = list[float]()

    def run(self) -> None:
        body = {**self.server.endless(), "prompt": f"x = {self.number}\n", "temperature": 0.7, "seed": self.number}
        with (
            httpx.Client(base_url=self.server.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("text"):
                    self.times.append(time.perf_counter())
                if self.stop.is_set():
                    return


class Looking(threading.Thread):
    """Asks for /health again and again. times: (when it was answered, seconds that took)."""

    def __init__(self, server: Running, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.stop = server, stop
        self.times = list[tuple[float, float]]()

    def run(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=120) as client:
            while not self.stop.wait(0.02):
                asked = time.perf_counter()
                client.get("/health").raise_for_status()
                self.times.append((time.perf_counter(), time.perf_counter() - asked))

    def between(self, since: float, until: float) -> list[float]:
        """Milliseconds, ascending."""
        return sorted(1e3 * took for at, took in self.times if since <= at < until)


def gaps(streams: Sequence[Streaming], since: float, until: float) -> list[float]:
    """Milliseconds, ascending."""
    return sorted(
        1e3 * (later - earlier) for one in streams for earlier, later in pairwise(one.times) if since <= later < until
    )


def row(name: str, found: Sequence[float]) -> dict[str, Any]:
    p50, p99 = found[len(found) // 2], found[int(0.99 * len(found))]
    return {
        "gaps": name,
        "number": len(found),
        "p50, ms": p50,
        "p99, ms": p99,
        "most, ms": found[-1],
        "p99/p50": p99 / p50,
    }


def measure(server: Running, streams: int, prompt: int) -> dict[str, Any]:
    stop = threading.Event()
    running = [Streaming(server, number, stop) for number in range(streams)]
    looking = Looking(server, stop)
    for one in (*running, looking):
        one.start()
    while any(len(one.times) < 8 for one in running):
        time.sleep(0.1)
    begin = time.perf_counter()
    time.sleep(ALONE_S)
    draw = random.Random(begin)
    text = " ".join(draw.choice(WORDS) for _ in range(prompt))
    tokens = server.client.post("/tokenize", json={"content": text}).json()["tokens"][:prompt]
    sent = time.perf_counter()
    answer = server.client.post("/v1/completions", json={"prompt": tokens, "max_tokens": 1}, timeout=600)
    read = time.perf_counter()
    answer.raise_for_status()
    stop.set()
    for one in (*running, looking):
        one.join(10)
    rows = [
        row("before", gaps(running, begin, sent)),
        row("while it is read", gaps(running, sent, read)),
        row("all", gaps(running, begin, read)),
        row("/health before", looking.between(begin, sent)),
        row("/health while it is read", looking.between(sent, read)),
    ]
    return {"streams": streams, "prompt": len(tokens), "read in, s": read - sent, "rows": rows}


def make_figures(found: dict[str, Any]) -> list[Figure]:
    rows, at = {row["gaps"]: row for row in found["rows"]}, f"{found['streams']} streams, {found['prompt']} tokens read"
    late, looked = rows["while it is read"]["p99/p50"], rows["/health while it is read"]["p99, ms"]
    return [
        Figure("service", "gaps beside a long prompt, p99 over p50", at, "x", late, goal=Goal(at_most=3)),
        Figure("service", "/health beside a long prompt, p99", at, "ms", looked, goal=Goal(at_most=20)),
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--model", default="demo")
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    with serving(given.model, "--slots", str(given.streams + 1), *given.options) as server:
        found = measure(server, given.streams, given.prompt)
    print_table(
        f"{given.streams} streams while {found['prompt']} tokens were read in {found['read in, s']:.1f} s",
        found["rows"],
    )
    publish(given, "beside_prefill", found, make_figures(found))


if __name__ == "__main__":
    main()
