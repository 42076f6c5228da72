"""`rekindle simulate`: computes what cache policies would have done with logged requests, as table, JSON and plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve
from rich.console import Console

from effects.compression import WHOLE, Compression
from effects.scope import Scope
from engine.settings.output.formatting import format_count
from engine.settings.output.plot_style import check_plot_path
from engine.settings.output.progress import count_progress
from engine.settings.user_error import UserError
from engine.tools.simulation.acceptance_profile import read_profile
from engine.tools.simulation.fleet.simulate_fleet import simulate_fleet
from engine.tools.simulation.logs.logged_requests import MOST_TOKENS
from engine.tools.simulation.logs.read_log import Logs, read_logs
from engine.tools.simulation.parallel_runs import count_cores, run_side_by_side
from engine.tools.simulation.simulate_scope import Setup, Simulation, fit_settings
from engine.tools.simulation.simulated_costs import Costs, list_figures, read_costs
from engine.tools.simulation.simulation_options import SimulatedPolicies, SimulatedServerOptions, SimulationOptions
from engine.tools.simulation.simulation_plot import draw_simulation
from engine.tools.simulation.simulation_report import print_report
from engine.tools.simulation.tally import FinishedRun
from states.settings import Settings

MIB = 1 << 20
# The most tokens of all runs in one process: some seconds of work, which make a process of their own worthwhile.
LONG = 1 << 23


def run(paths: Sequence[Path], wanted: SimulationOptions) -> int:
    """Simulate and report. Return the exit status. Raises UserError or OSError."""
    if wanted.output.plot is not None:
        check_plot_path(wanted.output.plot)
    server = wanted.server
    logs = read_logs(paths, server.model, shared_head=server.shared_head)
    if wanted.fleet.replicas:
        return simulate_fleet(wanted.fleet, wanted.output, logs, build_setup(wanted.policies, server, logs))
    setup = build_setup(wanted.policies, server, logs)
    runs = run_scopes(setup, logs, wanted.policies.scopes)
    if wanted.output.json:
        print(json.dumps(build_json(server, logs, setup, runs), indent=2))
    else:
        print_report(Console(), logs, setup, runs)
    if wanted.output.plot is not None:
        draw_simulation(wanted.output.plot, runs, describe_run(logs, runs[0]))
    return 0


def describe_run(logs: Logs, run: FinishedRun) -> str:
    figures_ = run.figures
    tokens = f"{figures_.prompt_tokens / 1e6:,.1f} million prompt tokens"
    return f"{format_count(figures_.requests, 'request')} of {format_count(len(logs.sessions), 'session')}, {tokens}"


def build_setup(policies: SimulatedPolicies, server: SimulatedServerOptions, logs: Logs) -> Setup:
    try:
        costs = logs.measured.apply_to(Costs(), "recorded in the traces")
    except (ValueError, OverflowError) as error:
        raise UserError(f"the times that the traces tell cannot be: {error}") from error
    if server.costs is not None:
        costs = read_costs(server.costs, costs)
    if server.acceptance is not None:
        costs = evolve(costs, acceptance=read_profile(server.acceptance, server.draft, server.width))
    elif server.draft or server.width:
        raise UserError("--draft and --width choose from a file of proposals: accepted with --acceptance only")
    if server.state_bytes is not None:
        costs = evolve(costs, state_bytes=server.state_bytes)
    settings = with_state(
        evolve(build_served_settings(logs.settings), store=True, rates=costs.build_rates()), costs, server
    )
    if server.slots is not None:
        settings = evolve(settings, slots=server.slots, spare_slots=0)
    if policies.min_tokens is not None:
        settings = evolve(settings, min_tokens=policies.min_tokens)
    keep = max(1, round(policies.prefill_keep_ratio * WHOLE))
    compression = Compression(policies.prefill_compression, policies.prefill_threshold, keep, freeze=policies.freeze)
    if compression.mode != "off":
        settings = evolve(settings, scorer_max_tokens=MOST_TOKENS)
    elif policies.freeze:
        raise UserError(
            "--freeze shortens messages where --prefill-compression says so: accepted with it: auto, always"
        )
    budget = policies.budget * MIB if policies.budget_tokens is None else policies.budget_tokens * costs.token_bytes
    return Setup(
        fit_settings(settings, logs.sessions),
        costs,
        disk_budget=budget,
        host_budget=policies.host_budget * MIB,
        restart_every=server.restart_every,
        interleave=server.interleave,
        compression=compression,
    )


def build_served_settings(recorded: Settings | None) -> Settings:
    """Return the settings of a trace with the options that were given, and without what is not simulated: the draft,
    and a lane for prompts.
    """
    if recorded is None:
        return Settings(
            slots=4,
            mixed_rows=64,
            min_tokens=512,
            checkpoint_interval=10240,
            shared_checkpoint_limit=10240,
            state_checkpoints=8,
        )
    plain = Settings()
    kept = (
        "slots",
        "spare_slots",
        "chunk",
        "block_size",
        "keep_decoded",
        "batch_rows",
        "mixed_rows",
        "min_tokens",
        "latency_target_ns",
    )
    state = ("checkpoint_interval", "shared_checkpoint_limit", "state_checkpoints", "commits_per_segment")
    return evolve(plain, **{name: getattr(recorded, name) for name in (*kept, *state)})


def with_state(settings: Settings, costs: Costs, server: SimulatedServerOptions) -> Settings:
    """Return the settings with recurrent state if the costs have any, or else without anything that belongs to it."""
    if not costs.state_bytes:
        return evolve(settings, state_checkpoints=0)
    checkpoints = settings.state_checkpoints if server.state_checkpoints is None else server.state_checkpoints
    return evolve(settings, stateful=True, state_tokens=costs.state_tokens, state_checkpoints=checkpoints)


def run_scopes(setup: Setup, logs: Logs, wanted: Sequence[Scope]) -> list[FinishedRun]:
    """Run each scope, and before them a run without any cache. Long runs get processes of their own."""
    scopes: list[Scope | None] = [None, *wanted]

    def run(scope: Scope | None, step: Callable[[], None]) -> FinishedRun:
        simulation = Simulation(setup, logs.sessions, scope, step)
        simulation.run()
        return simulation.build_result()

    requests = sum(session.count for session in logs.sessions)
    every = (request for session in logs.sessions for agent in session.agents for request in agent.requests)
    tokens = sum(request.length + len(request.answer) for request in every)
    with count_progress("simulated requests", requests * len(scopes)) as step:
        most = count_cores() if len(scopes) * tokens >= LONG else 1
        return run_side_by_side([partial(run, scope) for scope in scopes], step, most)


def build_json(server: SimulatedServerOptions, logs: Logs, setup: Setup, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "logs": {
            "files": logs.formats,
            "sessions": len(logs.sessions),
            "texts": logs.texts or None,
            "shared_head": server.shared_head,
        },
        "costs": {"source": setup.costs.source, **list_figures(setup.costs)},
        "acceptance": None if setup.costs.acceptance is None else attrs.asdict(setup.costs.acceptance),
        "settings": {
            "slots": setup.settings.serving_slots,
            "chunk": setup.settings.chunk,
            "block_size": setup.settings.block_size,
            "min_tokens": setup.settings.min_tokens,
            "state_checkpoints": setup.settings.state_checkpoints,
            "budget_bytes": setup.disk_budget,
            "host_budget_bytes": setup.host_budget,
            "restart_every": setup.restart_every,
            "interleave": setup.interleave,
        },
        "scopes": [attrs.asdict(run.figures) for run in runs],
    }
