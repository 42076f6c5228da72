"""`rekindle simulate --replicas N`: compares routers on logged conversations, as table, JSON and plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import attrs
from rich.console import Console
from rich.table import Table

from engine.settings.output.formatting import WIDTH, format_bytes, format_count, format_duration
from engine.settings.output.progress import count_progress
from engine.tools.simulation.fleet.fleet_plot import draw_fleet
from engine.tools.simulation.fleet.fleet_run import FleetRun, FleetSetup
from engine.tools.simulation.fleet.fleet_tally import FinishedFleet, FleetFigures
from engine.tools.simulation.fleet.prompt_paths import chain_pieces
from engine.tools.simulation.logs.read_log import Logs
from engine.tools.simulation.parallel_runs import count_cores, run_side_by_side
from engine.tools.simulation.simulate_scope import Setup
from engine.tools.simulation.simulated_costs import list_figures
from engine.tools.simulation.simulation_options import SimulatedFleetOptions, SimulationOutput

MIB = 1 << 20
CONVERSATIONS = 16  # for each replica
LONG = 2000  # requests of all runs, from which on processes of their own are worthwhile
ROWS: tuple[tuple[str, Callable[[FleetFigures], str]], ...] = (
    ("hit tokens, of an infinite cache", lambda figures: f"{100 * figures.of_infinite:.2f} %"),
    ("computed tokens", lambda figures: f"{figures.computed_tokens:,}"),
    ("longest queue", lambda figures: f"{figures.longest_queue}"),
    ("  that a request met, mean", lambda figures: f"{figures.mean_queue:.2f}"),
    ("busiest replica, of the mean", lambda figures: f"{figures.busiest:.2f}x"),
    ("moved requests", lambda figures: f"{figures.moves:,}"),
    ("read elsewhere", lambda figures: f"{figures.read_elsewhere:,}"),
    ("read from the shared tier", lambda figures: format_bytes(figures.read_bytes)),
    ("written to it", lambda figures: format_bytes(figures.written_bytes)),
    ("first token, median", lambda figures: format_duration(figures.first_token_ms[0])),
    ("  90th percentile", lambda figures: format_duration(figures.first_token_ms[1])),
    ("  99th percentile", lambda figures: format_duration(figures.first_token_ms[2])),
    ("later tokens, mean", lambda figures: format_duration(figures.token_ms)),
)


def simulate_fleet(fleet: SimulatedFleetOptions, output: SimulationOutput, logs: Logs, server: Setup) -> int:
    """Simulate each router and report. server: the setup of one replica. Return the exit status. Raises OSError."""
    setup = build_fleet_setup(fleet, server)
    runs = run_routers(setup, logs, fleet.routers)
    if output.json:
        print(json.dumps(build_json(logs, setup, runs), indent=2))
    else:
        print_fleet(Console(), logs, setup, runs)
    if output.plot is not None:
        draw_fleet(output.plot, runs, describe_fleet(setup, runs[0].figures))
    return 0


def build_fleet_setup(fleet: SimulatedFleetOptions, server: Setup) -> FleetSetup:
    return FleetSetup(
        server.settings,
        server.costs,
        fleet.replicas,
        fleet.conversations or CONVERSATIONS * fleet.replicas,
        round(fleet.arrivals * 1e9),
        server.host_budget,
        server.disk_budget,
        fleet.shared_budget * MIB,
        fleet.prefill_elsewhere,
    )


def run_routers(setup: FleetSetup, logs: Logs, names: tuple[str, ...]) -> list[FinishedFleet]:
    """Run each router. Long runs get processes of their own."""
    chains = chain_pieces(logs.sessions, setup.settings.block_size)
    mean = sum(session.count for session in logs.sessions) // len(logs.sessions)
    requests = mean * setup.conversations * len(names)

    def run(name: str, step: Callable[[], None]) -> FinishedFleet:
        fleet_run = FleetRun(setup, logs.sessions, chains, name, step)
        return FinishedFleet(
            fleet_run.run(), tuple((request.first - request.sent) / 1e6 for request in fleet_run.requests)
        )

    with count_progress("simulated requests", requests) as step:
        most = count_cores() if requests >= LONG else 1
        return run_side_by_side([partial(run, name) for name in names], step, most)


def describe_fleet(setup: FleetSetup, figures: FleetFigures) -> str:
    tokens = f"{figures.prompt_tokens / 1e6:,.0f} million prompt tokens"
    conversations = format_count(setup.conversations, "conversation")
    return f"{format_count(figures.requests, 'request')} of {conversations}, {tokens}, {setup.replicas} replicas"


def print_fleet(console: Console, logs: Logs, setup: FleetSetup, runs: list[FinishedFleet]) -> None:
    every = [run.figures for run in runs]
    if not console.is_terminal:
        console = Console(width=max(WIDTH, 36 + 18 * len(runs)))
    share = every[0].infinite_hit_tokens / every[0].prompt_tokens
    console.print(
        f"{describe_fleet(setup, every[0])}; an infinite cache would have had {100 * share:.1f} % of them.",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for figures in every:
        table.add_column(figures.router, justify="right")
    for name, cell in ROWS:
        needs_shared = "shared" in name or "written" in name
        if (setup.shared_budget or not needs_shared) and (setup.remote_prefill_min_tokens or name != "read elsewhere"):
            table.add_row(name, *(cell(figures) for figures in every))
    console.print(table)
    shared = f", shared tier {format_bytes(setup.shared_budget)}" if setup.shared_budget else ", no shared tier"
    slots = format_count(setup.settings.serving_slots, "slot")
    disk = format_bytes(setup.disk_budget)
    notes = (
        f"Each replica: disk {disk}, host memory {format_bytes(setup.host_budget)}, {slots}{shared}.",
        f"Conversations begin within {setup.arrivals_ns / 1e9:g} s.",
        f"Times are predicted. Costs: {setup.costs.source}.",
        *([f"Texts were read with {logs.texts}."] if logs.texts else []),
    )
    for note in notes:
        console.print(note, style="dim", highlight=False)


def build_json(logs: Logs, setup: FleetSetup, runs: list[FinishedFleet]) -> dict[str, object]:
    """Return what --json prints."""
    return {
        "logs": {"files": logs.formats, "sessions": len(logs.sessions), "texts": logs.texts or None},
        "costs": {"source": setup.costs.source, **list_figures(setup.costs)},
        "fleet": {
            "replicas": setup.replicas,
            "conversations": setup.conversations,
            "arrivals_s": setup.arrivals_ns / 1e9,
            "slots": setup.settings.serving_slots,
            "disk_budget_bytes": setup.disk_budget,
            "host_budget_bytes": setup.host_budget,
            "shared_budget_bytes": setup.shared_budget,
            "prefill_elsewhere": setup.remote_prefill_min_tokens,
        },
        "routers": [attrs.asdict(run.figures) for run in runs],
    }
