"""A fleet under failures: agents' turns while replicas are killed and options are updated, against a single server.

`python -m benchmarks.fleet [--turns 200] [--kills 3] [--updates 1] [--sessions 8]`. A single server answers all turns
first, one session after another; each turn contains the answers before it. Then a fleet of two replicas on this machine
answers the same requests, all sessions at a time, with a pause before each turn. Meanwhile busy replicas are killed
with SIGKILL, by turns the server and its actor, and the options are updated. Every answer is compared token by token.
Half of the answers are streams.

`python -m benchmarks.fleet --overhead` measures what the fleet adds to a request: the same request goes by turns to a
server of its own and to the fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import httpx
from attrs import define, field, frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table

ROOT = Path(__file__).parents[1]
READY = re.compile(r"ready  (http://\S+)  .*?(?:ray=(\S+)  )?in ")
WORDS = ("cache", "prefix", "replica", "router", "token", "session", "tensor", "kernel", "stream", "answer", "prompt")
ANSWER_TOKENS = 24
SYSTEM_WORDS = 500
TURN_WORDS = 60
BUSY_S = 20.0  # for a replica to have a request, while there are turns left
SETTLE_S = 180.0  # for a replica to come back


@frozen
class FleetTurn:
    """One request of a session, and what the single server answered."""

    body: dict[str, Any]
    tokens: tuple[str, ...]
    cached: int


@define
class Outcome:
    """What became of the requests in the fleet."""

    answered: int = 0
    different: int = 0
    cached: int = 0
    failures: list[str] = field(factory=list)  # without a token
    cut: int = 0  # streams that ended after a token: their replica was killed


@contextmanager
def run_program(command: Sequence[str], log: Path) -> Iterator[tuple[str, str]]:
    """Run a server or a fleet for as long as the block takes. Yields its URL, and Ray's address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine", *command],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        ready = next((found for line in process.stdout if (found := READY.match(line))), None)
        if ready is None:
            raise SystemExit(f"it did not start: {log.read_text()[-2000:]}")
        Thread(target=process.stdout.read, daemon=True).start()
        yield ready[1], ready[2] or ""
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def write_text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def read_tokens(choice: dict[str, Any]) -> list[str]:
    """Return the tokens of a choice, or of a part of it, as their bytes show them."""
    return [json.dumps(one["bytes"]) for one in (choice.get("logprobs") or {}).get("content") or []]


def make_body(messages: Sequence[dict[str, str]], number: int) -> dict[str, Any]:
    body = {"messages": [*messages], "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": True}
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if number % 2 else body


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[tuple[str, ...], str, int]:
    """Return the tokens of an answer, its text, and the tokens of the prompt that were restored."""
    if not body.get("stream"):
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        choice = answer["choices"][0]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tuple(read_tokens(choice)), choice["message"]["content"], cached
    tokens = list[str]()
    text = ""
    cached = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if "error" in part:
                raise CutShortError(part["error"]["message"], tokens)
            for choice in part["choices"]:
                tokens += read_tokens(choice)
                text += choice["delta"].get("content") or ""
            cached = ((part.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    return tuple(tokens), text, cached


class CutShortError(Exception):
    """A stream ended with an error. tokens: that came before."""

    def __init__(self, message: str, tokens: Sequence[str]) -> None:
        super().__init__(message)
        self.tokens = tuple(tokens)


async def record_sessions(url: str, sessions: int, turns: int) -> list[list[FleetTurn]]:
    """Let the single server answer all turns of all sessions."""
    dice = random.Random(50)
    shared = write_text(dice, SYSTEM_WORDS)
    recorded = list[list[FleetTurn]]()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for session in range(sessions):
            messages = [{"role": "system", "content": f"{shared} {write_text(dice, 40)}"}]
            own = list[FleetTurn]()
            for number in range(session, turns, sessions):
                messages.append({"role": "user", "content": write_text(dice, TURN_WORDS)})
                body = {**make_body(messages, number), "prompt_cache_key": f"session-{session}"}
                tokens, text, cached = await ask(client, body)
                own.append(FleetTurn(body, tokens, cached))
                messages.append({"role": "assistant", "content": text})
            recorded.append(own)
    return recorded


async def replay_sessions(url: str, recorded: Sequence[Sequence[FleetTurn]], pause_s: float, outcome: Outcome) -> None:
    """Ask the fleet for all turns. Each session waits for its answers, and then on average for `pause_s`."""
    dice = random.Random(51)

    async def replay(client: httpx.AsyncClient, own: Sequence[FleetTurn]) -> None:
        for turn in own:
            await anyio.sleep(dice.uniform(0, 2 * pause_s))
            await replay_turn(client, turn, outcome)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client, anyio.create_task_group() as tasks:
        for own in recorded:
            tasks.start_soon(replay, client, own)


async def replay_turn(client: httpx.AsyncClient, turn: FleetTurn, outcome: Outcome) -> None:
    try:
        tokens, _, cached = await ask(client, turn.body)
    except CutShortError as error:
        outcome.different += error.tokens != turn.tokens[: len(error.tokens)]
        if error.tokens:
            outcome.cut += 1
        else:
            outcome.failures.append(str(error))
    except httpx.HTTPError as error:
        outcome.failures.append(repr(error))
    else:
        outcome.different += tokens != turn.tokens
        outcome.cached += cached
    outcome.answered += 1


async def disturb(url: str, update: Sequence[str], given: argparse.Namespace, outcome: Outcome) -> None:
    """Kill replicas and update the options, evenly over the turns. update: the words of the command that does it."""
    steps = deque(["kill"] * given.kills)
    for place in range(given.updates):
        steps.insert((place + 1) * len(steps) // (given.updates + 1), "update")
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number, step in enumerate(steps, 1):
            while outcome.answered < number * given.turns // (len(steps) + 1):  # noqa: ASYNC110 - one place asks
                await anyio.sleep(0.05)
            began = time.monotonic()
            if step == "kill":
                killed = await kill_replica(client, with_actor=number % 2 == 0)
                await wait_for_others(client, {killed})
            else:
                before = {one["id"] for one in await list_replicas(client)}
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
                await anyio.run_process([sys.executable, "-P", "-m", "engine", *update], env=environment)
                await wait_for_others(client, before)
            print(f"{step} after {outcome.answered} turns; two replicas again after {time.monotonic() - began:.1f} s")


async def list_replicas(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found = (await client.get("/fleet")).raise_for_status().json()["data"]
    return [one for one in found if one["state"] == "ready"]


async def kill_replica(client: httpx.AsyncClient, *, with_actor: bool) -> str:
    """Kill the busiest replica with SIGKILL while it answers: its actor, or its server alone. Return its id."""
    with anyio.move_on_after(BUSY_S):
        while not (victim := max(await list_replicas(client), key=lambda one: one["in_flight"]))["in_flight"]:  # noqa: ASYNC110 - over HTTP
            await anyio.sleep(0.02)
    os.kill(find_parent(victim["pid"]) if with_actor else victim["pid"], signal.SIGKILL)
    return str(victim["id"])


def find_parent(pid: int) -> int:
    """Return the process that started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def wait_for_others(client: httpx.AsyncClient, gone: set[str]) -> None:
    """Wait until two replicas are ready besides those that are gone."""
    with anyio.fail_after(SETTLE_S):
        while len({one["id"] for one in await list_replicas(client)} - gone) < 2:  # noqa: ASYNC110 - it asks over HTTP
            await anyio.sleep(0.5)


def measure_overhead(plain: str, fleet: str, runs: int) -> list[list[float]]:
    """Return the milliseconds of requests to a server, and of the same to a fleet, ascending. They take turns."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    spent: dict[str, list[float]] = {plain: [], fleet: []}
    with httpx.Client(timeout=60) as client:
        for run in range(runs):
            for url, times in spent.items():
                began = time.perf_counter()
                client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
                if run >= runs // 10:
                    times.append(1000 * (time.perf_counter() - began))
    return [sorted(times) for times in spent.values()]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--pause", type=float, default=10.0, help="seconds before a turn, on average")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--port", type=int, default=8470)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--runs", type=int, default=400)
    given = parser.parse_args()
    common = ["demo", "--slots", "4", "--threads", "1", "--max-ctx", "8192", "--kv-cache-min-tokens", "64"]
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder)
        single = ["serve", *common, "--port", "0", "--kv-cache-dir", str(kept / "single")]
        several = ["fleet", *common, "--port", str(given.port), "--kv-cache-dir", str(kept / "fleet")]
        if given.overhead:
            publish_overhead(given, single, several, kept)
        else:
            publish_failures(given, single, several, kept)


def publish_overhead(given: argparse.Namespace, single: list[str], several: list[str], kept: Path) -> None:
    with run_program(single, kept / "single.log") as (plain, _), run_program(several, kept / "fleet.log") as (fleet, _):
        times = measure_overhead(plain, fleet, given.runs)
    alone, routed = map(median, times)
    quick = [one[len(one) // 10] for one in times]  # what other work on the machine delays least
    print_table("median of a request of one token, ms", [{"server": alone, "fleet": routed, "added": routed - alone}])
    print_table("the same, 10th percentile", [{"server": quick[0], "fleet": quick[1], "added": quick[1] - quick[0]}])
    added = Figure(
        "service", "Fleet: time that it adds to a request", "median", "ms", routed - alone, goal=Goal(at_most=3.0)
    )
    raw = {"server_ms": alone, "fleet_ms": routed, "tenth_percentiles_ms": quick, "runs": given.runs}
    publish(given, "fleet_overhead", raw, [added], device="cpu")


def publish_failures(given: argparse.Namespace, single: list[str], several: list[str], kept: Path) -> None:
    with run_program(single, kept / "single.log") as (url, _):
        recorded = anyio.run(record_sessions, url, given.sessions, given.turns)
    outcome = Outcome()

    async def run(url: str, address: str) -> None:
        update = [*several, "--address", address, "--request-timeout", "1800"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb, url, update, given, outcome)
            await replay_sessions(url, recorded, given.pause, outcome)

    with run_program(several, kept / "fleet.log") as (url, address):
        anyio.run(run, url, address)
    wanted = sum(turn.cached for own in recorded for turn in own)
    raw = {
        "turns": outcome.answered,
        "failed_without_a_token": len(outcome.failures),
        "cut_after_a_token": outcome.cut,
        "different": outcome.different,
        "restored_tokens": outcome.cached,
        "restored_by_single_server": wanted,
    }
    print_table("turns in the fleet", [raw])
    print(*outcome.failures[:5], sep="\n")
    at = f"{outcome.answered} turns, {given.kills} kills, {given.updates} updates"
    none = Goal(at_most=0)
    figures = [
        Figure("service", "Fleet: requests that failed without a token", at, "", len(outcome.failures), goal=none),
        Figure("exactness", "Fleet: answers unlike a single server's", at, "", outcome.different, goal=none),
        Figure("service", "Fleet: restored tokens, of a single server's", at, "share", outcome.cached / wanted),
    ]
    publish(given, "fleet", {**raw, "failures": outcome.failures}, figures, device="cpu")


if __name__ == "__main__":
    main()
