"""Routers before 16, 64 and 256 replicas on agents' logs, simulated, and the time that one decision takes.

`python -m benchmarks.routing LOG... [--replicas 16,64,256] [--routers least-queue,ray-prefix,prefix]`. LOG: any files
that `rekindle simulate` reads. `--rows FILE` keeps each finished fleet there as a line of JSON, and does not simulate
again what the file has. Conversations are copies of the logs; sessions of token counts share tools and system
prompt (`--shared-head`). A replica is an 8B model in bf16 on one H200 (docs/SIMULATE.md). Each fleet is simulated
without a shared tier, and with one behind 10 Gbit/s for each replica. The queue of a replica is its open requests. The
comparison with the simulation of every launch is at one replica.

A decision is timed with 256 replicas, each holding a system prompt of 20,000 tokens and three conversations of 77,000.
It is the processor's time, with what the router notes about the request.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table
from effects.scope import Scope
from engine.tools.simulation.fleet.fleet_run import PREFIX, FleetRun, FleetSetup
from engine.tools.simulation.fleet.prompt_paths import PieceChain, chain_pieces
from engine.tools.simulation.logs.logged_requests import Session
from engine.tools.simulation.logs.read_log import read_logs
from engine.tools.simulation.parallel_runs import count_cores, run_side_by_side
from engine.tools.simulation.simulate_scope import Setup, Simulation, fit_settings
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.tally import compute_quantile
from states.rates import Rates
from states.routing.choose_replica import RouteQuery
from states.routing.digests import DigestWriter, LoadReport
from states.routing.prefix_router import DigestArrived, PrefixRouter, ReplicaAdded, RequestArrived, RequestEnded
from states.settings import Settings

H200 = Costs(
    source="an 8B model in bf16 on one H200",
    token_bytes=147_456,
    prefill=18_000,
    prefill_slope=1.8,
    decode=4_700_000,
    decode_slope=45,
    decode_more=50_000,
    host=3_300,
    disk=60_000,
    copy=300,
    write=70_000,
    shared=118_000,
    share=118_000,
)
GIB = 1 << 30
SHARED = 1 << 50  # bytes: nothing is evicted from the shared tier
CONVERSATIONS = 16  # for each replica
ARRIVALS_S = 300
BATCH = 20  # decisions that are timed together: reading the clock takes as long as some of them
LEAST = "least-queue"


def run_fleets(
    sessions: Sequence[Session],
    chains: Mapping[int, PieceChain],
    counts: Sequence[int],
    routers: Sequence[str],
    kept: Path,
) -> list[dict[str, Any]]:
    """Simulate every router before every number of replicas, with and without a shared tier. kept: finished rows."""
    settings = fit_settings(Settings(slots=16, store=True, min_tokens=512), sessions)
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    rows = {(row["replicas"], row["router"], row["shared_tier"]): row for row in known}

    def run(count: int, router: str, shared: int, step: Callable[[], None]) -> None:
        began = time.process_time()
        setup = FleetSetup(
            settings, H200, count, CONVERSATIONS * count, ARRIVALS_S * 10**9, 64 * GIB, 1024 * GIB, shared
        )
        figures = FleetRun(setup, sessions, chains, router).run()
        row = {**attrs.asdict(figures), "shared_tier": shared > 0, "seconds": time.process_time() - began}
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        step()

    asked = [(count, router, shared) for shared in (0, SHARED) for count in counts for router in routers]
    missing = [one for one in asked if (one[0], one[1], one[2] > 0) not in rows]
    runs = [partial(run, *one) for one in missing]
    run_side_by_side(runs, lambda: print(".", end="", flush=True), count_cores())
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    rows = {(row["replicas"], row["router"], row["shared_tier"]): row for row in found}
    return [rows[count, router, shared > 0] for count, router, shared in asked]


def compare_with_launches(sessions: Sequence[Session]) -> dict[str, Any]:
    """Simulate one replica in both ways: every launch, and as a fluid."""
    settings = fit_settings(Settings(slots=16, store=True, min_tokens=512, rates=H200.build_rates()), sessions)
    # Absolute times would be kept by one of the two only.
    sessions = [attrs.evolve(session, absolute=False) for session in sessions]
    whole = Simulation(Setup(settings, H200, 1 << 50, 64 * GIB), sessions, Scope("full"))
    whole.run()
    lean = FleetRun(
        FleetSetup(settings, H200, 1, len(sessions), 0, 64 * GIB, 1 << 50), sessions, chain_pieces(sessions, 64), LEAST
    )
    lean.run()
    waits = ([one.first_ms for one in whole.tally.counts.values()], [(r.first - r.sent) / 1e6 for r in lean.requests])
    return {
        "requests": len(lean.requests),
        "found": [sum(one.found for one in whole.tally.counts.values()), sum(r.found for r in lean.requests)],
        "first_token_ms": {share: [compute_quantile(one, share) for one in waits] for share in (0.25, 0.5, 0.75, 0.9)},
    }


def name_keys(name: str, count: int) -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


def time_decisions(replicas: int = 256, decisions: int = 4000) -> list[float]:
    """Return the microseconds of a decision, on average over each BATCH of them, ascending."""
    router = PrefixRouter()
    rates = Rates((20_000,) * 10, {"host": 3_300, "disk": 60_000, "shared": 118_000})
    head = name_keys("head", 320)
    for number in range(replicas):
        router.advance(ReplicaAdded(str(number)))
        writer = DigestWriter(1)
        turns = [name_keys(f"{number} {conversation}", 1200) for conversation in range(3)]
        writer.set_held({"device": [*head, *turns[0]], "host": [*head, *turns[1]], "disk": [*head, *turns[2]]})
        router.advance(DigestArrived(str(number), writer.write(LoadReport(0, 16, 10**9, rates)), 0))
    took = list[float]()
    for first in range(0, decisions, BATCH):
        events = [make_arrival(number, replicas, head) for number in range(first, first + BATCH)]
        began = time.process_time_ns()
        for event in events:
            router.advance(event)
        took.append((time.process_time_ns() - began) / BATCH / 1000)
        for number in range(max(0, first - 2 * replicas), max(0, first + BATCH - 2 * replicas)):
            router.advance(RequestEnded(number))
    return sorted(took)


def make_arrival(number: int, replicas: int, head: Sequence[bytes]) -> RequestArrived:
    """Make the event of a request that continues one of the conversations."""
    session = f"{number * 7919 % replicas} {number % 3}"
    keys = (*head, *name_keys(session, 1200))
    query = RouteQuery(number, keys, range(64, 64 * len(keys) + 1, 64), 64 * len(keys) + 10, session)
    return RequestArrived(query, number * 10**7)


def make_figures(rows: Sequence[Mapping[str, Any]], decisions: Mapping[float, float]) -> list[Figure]:
    """Make the figures that have goals: of the router by prefix, without a shared tier and with one.

    decisions: microseconds of a decision, by quantile.
    """
    found = list[Figure]()
    queues = list[Figure]()
    least = {(row["replicas"], row["shared_tier"]): row["longest_queue"] for row in rows if row["router"] == LEAST}
    for row in rows:
        if row["router"] != PREFIX:
            continue
        at = f"{row['replicas']}" + (" shared" if row["shared_tier"] else "")
        what = "routing by prefix, replicas: tokens found, of an infinite cache's"
        found.append(Figure("agents", what, at, "%", 100 * row["of_infinite"], goal=Goal(at_least=97)))
        what = "routing by prefix, replicas: longest queue, of least queue's"
        ratio = row["longest_queue"] / least[row["replicas"], row["shared_tier"]]
        queues.append(Figure("agents", what, at, "x", ratio, goal=Goal(at_most=1.3)))
    decision = Figure("agents", "a routing decision", "256 replicas", "us", decisions[0.5], goal=Goal(at_most=200))
    return [*found, *queues, decision]


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--replicas", default="16,64,256")
    parser.add_argument("--routers", default="least-queue,ray-prefix,prefix")
    parser.add_argument("--rows", type=Path)
    given = parser.parse_args()
    kept = given.rows or Path(tempfile.mkdtemp()) / "rows.jsonl"
    decisions = time_decisions()
    timed = {share: compute_quantile(decisions, share) for share in (0.5, 0.9, 0.99)}
    print_table("a decision at 256 replicas", [{f"{100 * share:g}_%_us": took for share, took in timed.items()}])
    logs = read_logs(given.logs, shared_head=True)
    compared = compare_with_launches(logs.sessions[:12])
    print_table("one replica: every launch, and as a fluid", [{key: str(value) for key, value in compared.items()}])
    chains = chain_pieces(logs.sessions, 64)
    counts = [int(word) for word in given.replicas.split(",")]
    rows = run_fleets(logs.sessions, chains, counts, given.routers.split(","), kept)
    shown = ("replicas", "router", "shared_tier", "of_infinite", "longest_queue", "mean_queue", "busiest", "moves")
    more = ("requests", "read_bytes", "written_bytes", "first_token_ms", "seconds")
    print_table("routers (goals: 97 %; 1.3x)", [{key: row[key] for key in (*shown, *more)} for row in rows])
    publish(given, "routing", {"decision_us": timed, "one_replica": compared, "rows": rows}, make_figures(rows, timed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
