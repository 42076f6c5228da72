"""A real server under mixed work for a long time: what grows? Then: does its trace replay, on the model too?

`python -m benchmarks.soak [--minutes 60] [--rate 2] [--out soak] [SERVE OPTIONS]`

Clients talk over HTTP, a bounded number of requests a second: conversations that go on and begin again, answers that
are left half-way, requests that are wrong. Every five seconds the server's memory, descriptors, threads and disk are
read from outside, and written to OUT.json with a plot OUT.svg. The slope is that of a line through the last half, so
the caches are small enough to be full by then, and to evict.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import httpx

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish

ROOT = Path(__file__).parents[1]
EVERY_S = 5
BUDGETS = {"--host-cache-budget": 16, "--kv-cache-budget": 16}  # MiB; two requests a second keep 1.3 a minute
TOPICS = ("a stack", "the prime numbers", "why the sky is blue", "a poem on rain", "sorting", "how a cache works")
WRONG: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"},
    {"messages": [{"role": "user", "content": "x " * 200_000}]},
    {"model": 5},
)
TURNS = 6  # of a conversation, then it begins again
TIMEOUT = httpx.Timeout(120)


class Soak:
    """The clients, and what they got."""

    def __init__(self, url: str, rate: float, stop_at: float) -> None:
        self.url, self.rate, self.stop_at = url, rate, stop_at
        self.counts: Counter[str] = Counter()
        self.random = random.Random(7)
        self.talks = [list[dict[str, str]]() for _ in range(8)]

    async def run(self) -> None:
        """A request every 1 / rate seconds, as long as no more than sixteen are waited for."""
        limiter = anyio.CapacityLimiter(16)
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT) as client, anyio.create_task_group() as tasks:
            while time.monotonic() < self.stop_at:
                if limiter.available_tokens:
                    tasks.start_soon(self.one, client, limiter)
                await anyio.sleep(self.random.expovariate(self.rate))

    async def one(self, client: httpx.AsyncClient, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            kind = self.random.choices(("talk", "leave", "wrong", "look", "complete"), (6, 2, 1, 1, 2))[0]
            try:
                said = await getattr(self, kind)(client)
            except httpx.HTTPError as error:
                said = type(error).__name__
            self.counts[f"{kind}: {said}"] += 1

    async def talk(self, client: httpx.AsyncClient) -> int:
        index = self.random.randrange(len(self.talks))
        so_far = self.talks[index] if len(self.talks[index]) < 2 * TURNS else []
        asked = [*so_far, {"role": "user", "content": f"Tell me more about {self.random.choice(TOPICS)}."}]
        body = {"messages": asked, "max_tokens": self.random.randint(8, 96), "seed": self.random.randrange(1000)}
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            self.talks[index] = [
                *asked,
                {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]},
            ]
        return answer.status_code

    async def leave(self, client: httpx.AsyncClient) -> str:
        """Close the connection after a few pieces of the answer, or before the first."""
        body = {"messages": [{"role": "user", "content": "Count to a thousand."}], "max_tokens": 400, "stream": True}
        pieces = self.random.randint(0, 12)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                pieces -= 1
                if pieces < 0:
                    break
        return "left"

    async def wrong(self, client: httpx.AsyncClient) -> int:
        return (await client.post("/v1/chat/completions", json=self.random.choice(WRONG))).status_code

    async def look(self, client: httpx.AsyncClient) -> int:
        return (
            await client.get(self.random.choice(("/health", "/metrics", "/props", "/slots", "/nowhere")))
        ).status_code

    async def complete(self, client: httpx.AsyncClient) -> int:
        prompt = [10 + 37 * n % 4000 for n in range(self.random.randint(20, 1200))]
        body = {"prompt": prompt, "max_tokens": self.random.randint(1, 32), "temperature": 0}
        return (await client.post("/v1/completions", json=body)).status_code


def sample(pid: int, folder: Path, started: float) -> dict[str, float]:
    """Return what the process has, as the kernel reports it: MiB and counts."""
    process = Path("/proc") / str(pid)
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE))
    status = dict(re.findall(r"^(\w+):\s+(\d+)", (process / "status").read_text(), re.MULTILINE))
    files = [entry.stat().st_size for entry in folder.rglob("*") if entry.is_file()]
    return {
        "seconds": round(time.monotonic() - started, 2),
        "rss": int(memory["Rss"]) / 1024,
        "pss": int(memory["Pss"]) / 1024,
        "anonymous": int(memory["Anonymous"]) / 1024,
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "disk": sum(files) / 2**20,
        "files": len(files),
    }


async def watch_process(pid: int, folder: Path, stop_at: float, samples: list[dict[str, float]]) -> None:
    started = time.monotonic()
    while time.monotonic() < stop_at:
        samples.append(await anyio.to_thread.run_sync(sample, pid, folder, started))
        if len(samples) % 12 == 0:
            last = samples[-1]
            print(f"{last['seconds'] / 60:.0f} min: {last['rss']:.1f} MiB, {last['descriptors']:.0f} fds", flush=True)
        await anyio.sleep(EVERY_S)


def slope(samples: Sequence[dict[str, float]], name: str) -> float:
    """A minute, over the last half."""
    half = samples[len(samples) // 2 :]
    return 60 * statistics.linear_regression([one["seconds"] for one in half], [one[name] for one in half]).slope


def plot(path: Path, samples: Sequence[dict[str, float]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - only here

    figure = Figure(figsize=(10, 7), layout="constrained")
    minutes = [one["seconds"] / 60 for one in samples]
    groups = (("rss", "pss", "anonymous"), ("disk",), ("descriptors", "threads"))
    for axes, names in zip(figure.subplots(3, 1, sharex=True), groups, strict=True):
        for name in names:
            axes.plot(minutes, [one[name] for one in samples], label=name)
        axes.legend(loc="upper left", frameon=False)
        axes.set_ylabel("count" if "threads" in names else "MiB")
        axes.grid(alpha=0.3)
    axes.set_xlabel("minutes")
    figure.savefig(path)


def check_trace(trace: Path) -> list[dict[str, Any]]:
    """Return what replay says about the trace, with and without the model."""
    found = []
    for more in ((), ("--execute",)):
        words = [sys.executable, "-m", "engine", "replay", str(trace), *more]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        said = (done.stdout or done.stderr).strip()[-2000:]
        print(f"replay {' '.join(more)}: {done.returncode}, {said}", flush=True)
        found.append({"words": more, "status": done.returncode, "said": said})
    return found


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=2, help="requests a second")
    parser.add_argument("--plot", type=Path, help="draw what grows there, an SVG")
    arguments, options = parser.parse_known_args()
    with TemporaryDirectory() as index:
        folder, trace, log = Path(index) / "kv", Path(index) / "trace.jsonl.zst", Path(index) / "log"
        words = ["serve", "--port", "0", "--kv-cache-dir", str(folder), "--trace", str(trace)]
        given = {option.partition("=")[0] for option in options}
        budgets = [f"{name}={budget}" for name, budget in BUDGETS.items() if name not in given]
        with log.open("w") as errors:
            command = [sys.executable, "-m", "engine", *words, *budgets, *options]
            server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith("ready"), log.read_text()
        samples = list[dict[str, float]]()
        stop_at = time.monotonic() + 60 * arguments.minutes
        soak = Soak(ready.split()[1], arguments.rate, stop_at)

        async def both() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_process, server.pid, Path(index), stop_at, samples)
                tasks.start_soon(soak.run)

        try:
            anyio.run(both)
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(120)
            server.stdout.close()
        slopes = {name: round(slope(samples, name), 4) for name in samples[0] if name != "seconds"}
        tracebacks = log.read_text().count("Traceback")
        print(f"a minute, over the last half: {slopes}", *sorted(soak.counts.items()), sep="\n  ")
        size = trace.stat().st_size / 2**20
        print(f"exit status {status}, {tracebacks} tracebacks in the log, a trace of {size:.1f} MiB", flush=True)
        replays = check_trace(trace)
    whole = {"options": options, "minutes": arguments.minutes, "rate": arguments.rate}
    whole |= {"slopes_a_minute": slopes, "status": status, "tracebacks": tracebacks, "replays": replays}
    whole |= {"answers": dict(soak.counts), "samples": samples}
    if arguments.plot is not None:
        plot(arguments.plot, samples)
    goal, at = Goal(at_most=0.1), f"{arguments.minutes:g} minutes"
    figures = [Figure("memory", "resident memory grows, a minute", at, "MiB", slopes["rss"], goal=goal)]
    publish(arguments, "soak", whole, figures)
    return int(bool(status or tracebacks or any(one["status"] for one in replays)))


if __name__ == "__main__":
    raise SystemExit(main())
