"""A fleet under failures: agents' turns while replicas are killed and options are updated, against a single server.

`python -m benchmarks.fleet [--turns 200] [--kills 3] [--updates 1] [--outages 1] [--sessions 8]`. A single server
answers all turns first, one session after another; each turn contains the answers before it. Then a fleet of two
replicas on this machine answers the same requests, all sessions at a time, with a pause before each turn. Meanwhile
busy replicas are killed with SIGKILL, by turns the server and its actor, and the options are updated. The replicas
share a tier in an S3 store, `moto`'s server process, which is killed and started again without its objects. With
`--store file` they share a folder, which goes away and comes back as a mount would. Every answer is compared token by
token. Half of the answers are streams. `--outages 0` runs without a shared tier.

What happens is placed by the number of the turn, and not by time (`TurnGate`): before the first turn behind a given
number begins, all earlier turns have been answered, and what is due there has begun. So an outage in the middle of the
events lies in the middle of the turns, however slow the machine is.

`python -m benchmarks.fleet --overhead` measures what the fleet adds to a request. Requests go by turns through the
fleet, and straight to the server of the replica that the fleet has chosen, which is a server like any other. So both
ways end in one process, and only the way differs. One kind of request is a few words, always the same. The other is a
conversation of some thousand tokens that grows by a message each time.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import httpx
from attrs import define, field, frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from tests.store.shared_servers import BUCKET, MotoServer, find_moto, moto_server

ROOT = Path(__file__).parents[1]
READY = re.compile(r"ready  (http://\S+)  .*?(?:ray=(\S+)  )?in ")
WORDS = ("cache", "prefix", "replica", "router", "token", "session", "tensor", "kernel", "stream", "answer", "prompt")
REPLICA_HEADER = "x-rekindle-replica"
ANSWER_TOKENS = 24
SYSTEM_WORDS = 500
TURN_WORDS = 60
SHARED_FIGURES = ("outages", "written", "read_bytes", "damaged")
BUSY_S = 20.0  # for a replica to have a request, while there are turns left
SETTLE_S = 900.0  # for a replica to come back, also on a machine with much other work


@frozen
class FleetTurn:
    """One request of a session, and what the single server answered."""

    body: dict[str, Any]
    tokens: tuple[str, ...]
    cached: int


@define(eq=False)
class SharedFigures:
    """The figures of the shared tier, as each replica has shown them last. Those of replicas that have died count."""

    last: dict[str, dict[str, int]] = field(factory=dict)

    async def read(self, client: httpx.AsyncClient) -> None:
        """Ask all replicas. One that does not answer keeps its earlier figures."""
        for one in await list_replicas(client):
            with suppress(httpx.HTTPError):
                props = (await client.get("/props", params={"replica": one["id"]})).raise_for_status().json()
                if figures := props["full_cache"].get("shared"):
                    self.last[one["id"]] = {name: figures[name] for name in SHARED_FIGURES}

    async def keep_reading(self, url: str) -> None:
        """Ask every other second, until this is cancelled."""
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while True:
                with suppress(httpx.HTTPError):
                    await self.read(client)
                await anyio.sleep(2)

    def sum_up(self) -> dict[str, int]:
        return {name: sum(figures[name] for figures in self.last.values()) for name in SHARED_FIGURES}


@define
class Outcome:
    """Counts of how the requests to the fleet ended."""

    answered: int = 0
    different: int = 0
    cached: int = 0
    failures: list[str] = field(factory=list)  # without a token
    cut: int = 0  # streams that ended after a token: their replica was killed
    shared: SharedFigures = field(factory=SharedFigures)


@define(eq=False)
class TurnGate:
    """Holds turns back until what is due before them has begun.

    opened: turns with smaller numbers may begin. answered: turns that have ended. changed: set, and replaced, whenever
    either has changed.
    """

    opened: int
    begun: int = 0
    answered: int = 0
    changed: anyio.Event = field(factory=anyio.Event)

    async def begin_turn(self) -> None:
        """Wait until the next turn may begin, and count it."""
        while self.begun >= self.opened:
            await self.changed.wait()
        self.begun += 1

    def open_until(self, number: int) -> None:
        """Let the turns before this one begin."""
        self.opened = number
        self._notify()

    def end_turn(self) -> None:
        self.answered += 1
        self._notify()

    async def wait_for_answers(self, count: int) -> None:
        """Wait until so many turns have ended."""
        while self.answered < count:
            await self.changed.wait()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


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
    reader = Thread(target=process.stdout.read, daemon=True)
    try:
        ready = next((found for line in process.stdout if (found := READY.match(line))), None)
        if ready is None:
            raise SystemExit(f"it did not start: {log.read_text()[-2000:]}")
        reader.start()
        yield ready[1], ready[2] or ""
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        if reader.ident is not None:
            reader.join()  # the output ends with the last process that has it
        process.stdout.close()


def write_text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def read_tokens(choice: dict[str, Any]) -> list[str]:
    """Return the tokens of a choice, or of a part of it, as their bytes show them."""
    return [json.dumps(one["bytes"]) for one in (choice.get("logprobs") or {}).get("content") or []]


def make_body(messages: Sequence[dict[str, str]], number: int) -> dict[str, Any]:
    body = {"messages": [*messages], "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": True}
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if number % 2 else body


@frozen
class FleetAnswer:
    """An answer: its tokens and its text, the tokens of the prompt that were restored, and the replica that gave it."""

    tokens: tuple[str, ...]
    text: str
    cached: int
    replica: str


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> FleetAnswer:
    """Return what a server or a fleet answers. Raises CutShortError or httpx.HTTPError."""
    if not body.get("stream"):
        response = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        answer = response.json()
        choice = answer["choices"][0]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        replica = response.headers.get(REPLICA_HEADER, "")
        return FleetAnswer(tuple(read_tokens(choice)), choice["message"]["content"], cached, replica)
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
        replica = response.headers.get(REPLICA_HEADER, "")
    return FleetAnswer(tuple(tokens), text, cached, replica)


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
                answer = await ask(client, body)
                own.append(FleetTurn(body, answer.tokens, answer.cached))
                messages.append({"role": "assistant", "content": answer.text})
            recorded.append(own)
    return recorded


async def replay_sessions(
    url: str, recorded: Sequence[Sequence[FleetTurn]], pause_s: float, gate: TurnGate, outcome: Outcome
) -> None:
    """Ask the fleet for all turns. Each session waits for its answers, and then on average for `pause_s`."""
    dice = random.Random(51)

    async def replay(client: httpx.AsyncClient, own: Sequence[FleetTurn]) -> None:
        for turn in own:
            await anyio.sleep(dice.uniform(0, 2 * pause_s))
            await gate.begin_turn()
            await replay_turn(client, turn, outcome)
            gate.end_turn()

    async with httpx.AsyncClient(base_url=url, timeout=600) as client, anyio.create_task_group() as tasks:
        for own in recorded:
            tasks.start_soon(replay, client, own)


async def replay_turn(client: httpx.AsyncClient, turn: FleetTurn, outcome: Outcome) -> None:
    try:
        answer = await ask(client, turn.body)
    except CutShortError as error:
        outcome.different += error.tokens != turn.tokens[: len(error.tokens)]
        if error.tokens:
            outcome.cut += 1
        else:
            outcome.failures.append(str(error))
    except httpx.HTTPError as error:
        outcome.failures.append(repr(error))
    else:
        outcome.different += answer.tokens != turn.tokens
        outcome.cached += answer.cached
    outcome.answered += 1


def plan_steps(given: argparse.Namespace) -> deque[str]:
    """Return what happens to the fleet, in order: the rarer events lie evenly among the kills."""
    steps = deque(["kill"] * given.kills)
    for event, count in (("update", given.updates), ("outage", given.outages)):
        for turn in range(count):
            steps.insert((turn + 1) * len(steps) // (count + 1), event)
    return steps


@frozen
class SharedFolder:
    """A folder as a store that can go away. A file has its name meanwhile, so every operation on it fails."""

    folder: Path

    @property
    def _moved(self) -> Path:
        return self.folder.with_name("away")

    def kill(self) -> None:
        self.folder.rename(self._moved)
        self.folder.touch()

    def start(self) -> None:
        self.folder.unlink()
        self._moved.rename(self.folder)


async def disturb(
    url: str, update: Sequence[str], store: MotoServer | SharedFolder | None, given: argparse.Namespace, gate: TurnGate
) -> None:
    """Kill replicas, update the options and stop the store, evenly over the turns.

    update: the words of the command that updates the options.
    """
    steps = plan_steps(given)
    turns_of_steps = [number * given.turns // (len(steps) + 1) for number in range(1, len(steps) + 1)]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number, (step, turn, end) in enumerate(
            zip(steps, turns_of_steps, [*turns_of_steps[1:], given.turns], strict=True), 1
        ):
            gate.open_until(turn)
            await gate.wait_for_answers(turn)
            began = time.monotonic()
            if step == "outage":
                assert store is not None
                store.kill()
                gate.open_until(end)
                await gate.wait_for_answers((turn + end) // 2)
                await anyio.to_thread.run_sync(store.start)
            elif step == "kill":
                gate.open_until(end)
                killed = await kill_replica(client, with_actor=number % 2 == 0)
                await wait_for_others(client, {killed})
            else:
                gate.open_until(end)
                before = {one["id"] for one in await list_replicas(client)}
                await deploy(update)
                await wait_for_others(client, before)
            spent_s = time.monotonic() - began
            print(f"{step}: turns {turn} to {gate.answered} of {given.turns}, {spent_s:.1f} s", flush=True)
    gate.open_until(given.turns)


async def deploy(words: Sequence[str]) -> None:
    """Run the command that updates a fleet, and wait until Ray Serve runs what it was given."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
    await anyio.run_process([sys.executable, "-P", "-m", "engine", *words], env=environment)


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


@define
class OverheadRows:
    """Milliseconds of requests of one kind: through the fleet, and straight to the server that has answered it."""

    fleet: list[float] = field(factory=list)
    server: list[float] = field(factory=list)

    @property
    def added(self) -> float:
        """The median of the differences between a request and the next one of the other way."""
        return median([one - other for one, other in zip(self.fleet, self.server, strict=True)])

    def make_row(self, kind: str) -> dict[str, Any]:
        quick = [sorted(times)[len(times) // 10] for times in (self.server, self.fleet)]
        row = {"request": kind, "server": median(self.server), "fleet": median(self.fleet), "added": self.added}
        return {**row, "server_p10": quick[0], "fleet_p10": quick[1]}  # what other work on the machine delays least


def measure_overhead(fleet: str, runs: int) -> dict[str, OverheadRows]:
    """Measure two kinds of requests by turns on both ways."""
    dice = random.Random(53)
    with httpx.Client(timeout=60) as client:
        short = [{"role": "user", "content": "Hello"}]
        rows = {"short": measure_requests(client, fleet, runs, lambda _: short)}
        talks = [[{"role": "system", "content": write_text(dice, 2 * SYSTEM_WORDS)}] for _ in range(2)]

        def grow(way: int) -> list[dict[str, str]]:
            talks[way] += [{"role": "user", "content": write_text(dice, 10)}, {"role": "assistant", "content": "Good."}]
            return talks[way][:-1]

        rows["conversation"] = measure_requests(client, fleet, runs // 4, grow)
    return rows


def measure_requests(
    client: httpx.Client, fleet: str, runs: int, make_messages: Callable[[int], list[dict[str, str]]]
) -> OverheadRows:
    """Send requests by turns through the fleet (way 0) and to a replica's server (way 1). The first tenth warms up."""
    rows = OverheadRows()
    servers: dict[str, str] = {one["id"]: one["url"] for one in client.get(f"{fleet}/fleet").json()["data"]}
    for run in range(runs):
        spent = list[float]()
        url = fleet
        for way in range(2):
            body = {"messages": make_messages(way), "max_tokens": 1, "temperature": 0, "prompt_cache_key": "overhead"}
            began = time.perf_counter()
            answer = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
            spent.append(1000 * (time.perf_counter() - began))
            url = url if way else servers[answer.headers["x-rekindle-replica"]]
        if run >= runs // 10:
            rows.fleet.append(spent[0])
            rows.server.append(spent[1])
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--pause", type=float, default=10.0, help="seconds before a turn, on average")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--outages", type=int, default=1)
    parser.add_argument("--store", choices=("s3", "file"), default="s3")
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
            publish_overhead(given, several, kept)
        else:
            publish_failures(given, single, several, kept)


def publish_overhead(given: argparse.Namespace, several: list[str], kept: Path) -> None:
    with run_program(several, kept / "fleet.log") as (fleet, _):
        kinds = measure_overhead(fleet, given.runs)
    rows = [one.make_row(kind) for kind, one in kinds.items()]
    print_table("a request of one token, ms: medians, and tenth percentiles", rows)
    most = Goal(at_most=3.0)
    subject = "Fleet: time that it adds to a request"
    figures = [Figure("service", subject, f"median, {kind}", "ms", one.added, goal=most) for kind, one in kinds.items()]
    publish(given, "fleet_overhead", {"rows": rows, "runs": given.runs}, figures, device="cpu")


@contextmanager
def open_shared_store(
    given: argparse.Namespace, kept: Path
) -> Iterator[tuple[MotoServer | SharedFolder | None, list[str]]]:
    """Yield the store that is to go away, and the words with which a fleet uses it."""
    if not given.outages:
        yield None, []
        return
    if given.store == "file":
        folder = SharedFolder(kept / "shared")
        folder.folder.mkdir()
        yield folder, ["--kv-shared-tier", folder.folder.as_uri()]
        return
    command = find_moto()
    assert command is not None, "pip install 'moto[server]', or name its command in REKINDLE_MOTO_SERVER"
    with moto_server(command) as store:
        yield store, ["--kv-shared-tier", f"s3://{BUCKET}/fleet"]


def publish_failures(given: argparse.Namespace, single: list[str], several: list[str], kept: Path) -> None:
    with run_program(single, kept / "single.log") as (url, _):
        recorded = anyio.run(record_sessions, url, given.sessions, given.turns)
    outcome = Outcome()
    gate = TurnGate(opened=0)

    async def run(url: str, address: str, words: Sequence[str], store: MotoServer | SharedFolder | None) -> None:
        update = [*words, "--address", address, "--request-timeout", "1800"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb, url, update, store, given, gate)
            tasks.start_soon(outcome.shared.keep_reading, url)
            await replay_sessions(url, recorded, given.pause, gate, outcome)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                await outcome.shared.read(client)
            tasks.cancel_scope.cancel()

    with open_shared_store(given, kept) as (store, more):
        words = [*several, *more]
        with run_program(words, kept / "fleet.log") as (url, address):
            anyio.run(run, url, address, words, store)
    wanted = sum(turn.cached for own in recorded for turn in own)
    raw = {
        "turns": outcome.answered,
        "failed_without_a_token": len(outcome.failures),
        "cut_after_a_token": outcome.cut,
        "different": outcome.different,
        "restored_tokens": outcome.cached,
        "restored_by_single_server": wanted,
        **{f"shared_{name}": count for name, count in outcome.shared.sum_up().items()},
    }
    print_table("turns in the fleet", [raw])
    print(*outcome.failures[:5], sep="\n")
    at = f"{outcome.answered} turns"
    at += f" of {given.store}" if given.outages else ""
    none = Goal(at_most=0)
    figures = [
        Figure("service", "Fleet: requests that failed without a token", at, "", len(outcome.failures), goal=none),
        Figure("exactness", "Fleet: answers unlike a single server's", at, "", outcome.different, goal=none),
        Figure(
            "service",
            "Fleet: restored tokens, of a single server's",
            at,
            "share",
            outcome.cached / wanted,
            goal=Goal(at_least=0.9),
        ),
    ]
    name = "fleet-file" if given.store == "file" else "fleet"
    publish(given, name, {**raw, "failures": outcome.failures}, figures, device="cpu")


if __name__ == "__main__":
    main()
