"""Hit tokens and written bytes on real agent logs: sessions interleaved, restarts, a budget, against an infinite cache.

`python -m benchmarks.agent_logs LOG... [--interleave 8] [--restart-every 100] [--tokens 1000000] [--scopes full]`.
LOG: any files that `rekindle simulate` reads. Every scope runs with the budget, in host memory nothing, and `full` once
more without a limit; each on two servers: one that takes no time, so the logs' own timestamps decide the order, and
the demo on two cores, where sessions wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table
from effects.scope import Scope, parse_scope
from engine.tools.simulation.logs.logged_requests import Session
from engine.tools.simulation.logs.read_log import read_logs
from engine.tools.simulation.simulate_scope import Setup, Simulation, fit_settings
from engine.tools.simulation.simulated_costs import Costs
from states.settings import Settings

TIMELESS = Costs(
    source="a server that takes no time",
    **dict.fromkeys(
        ("prefill", "prefill_slope", "decode", "decode_slope", "decode_more", "host", "disk", "copy", "write", "find"),
        0,
    ),
    launch=0,
)
SERVERS = {"takes no time": TIMELESS, "demo, two cores": Costs()}
ENDLESS = 1 << 50  # bytes


def one(setup: Setup, sessions: Sequence[Session], scope: Scope, server: str, budget: str) -> dict[str, Any]:
    started = time.perf_counter()
    run = Simulation(setup, sessions, scope)
    run.run()
    found = run.compute_figures()
    return {
        "server": server,
        "scope": str(scope),
        "budget": budget,
        "hits_%": 100 * found.hit_share,
        "infinite_%": 100 * found.infinite_share,
        "of_infinite_%": 100 * found.of_infinite,
        "written_GiB": found.written_bytes / 2**30,
        "of_unique": found.written_of_unique,
        "evicted": found.evictions,
        "dropped": found.dropped_writes,
        "restarts": found.restarts,
        "seconds": time.perf_counter() - started,
    }


def make_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Make figures of what is found, and of what is written where nothing is evicted."""
    found = list[Figure]()
    for row in rows:
        at = f"scope {row['scope']}, server: {row['server']}"
        if row["budget"] == "none":
            goal = Goal(at_most=1.05)
            found.append(Figure("agents", "written, of unique bytes, no limit", at, "x", row["of_unique"], goal=goal))
        else:
            share = Goal(at_least=99) if row["scope"] == "full" else None
            what = f"prompt tokens found, of an infinite cache's, room for {row['budget']}"
            found.append(Figure("agents", what, at, "%", row["of_infinite_%"], goal=share))
    return found


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--interleave", type=int, default=8)
    parser.add_argument("--restart-every", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--scopes", default="full")
    given = parser.parse_args()
    logs, rows = read_logs(given.logs), list[dict[str, Any]]()
    for server, costs in SERVERS.items():
        settings = fit_settings(Settings(slots=4, store=True, min_tokens=512, rates=costs.build_rates()), logs.sessions)
        budget = given.tokens * costs.token_bytes
        setup = Setup(settings, costs, budget, 0, given.restart_every, given.interleave)
        for scope in map(parse_scope, given.scopes.split(",")):
            rows.append(one(setup, logs.sessions, scope, server, f"{given.tokens:,} tokens"))
        endless = attrs.evolve(setup, disk_budget=ENDLESS)
        rows.append(one(endless, logs.sessions, Scope("full"), server, "none"))
    requests = sum(session.count for session in logs.sessions)
    title = f"{requests} requests of {len(logs.sessions)} sessions, {given.interleave} at a time"
    print_table(
        f"{title}, a restart every {given.restart_every} (goals: 99 % of infinite; 1.05 of unique without limit)", rows
    )
    publish(
        given, "agent_logs", {"sessions": [session.name for session in logs.sessions], "rows": rows}, make_figures(rows)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
