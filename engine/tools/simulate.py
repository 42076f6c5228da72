"""`rekindle simulate`: what cache policies would have done with requests that were logged: table, JSON, plot."""

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
from engine.settings.formatting import counted
from engine.settings.plot_style import check
from engine.settings.progress import progress
from engine.settings.user_error import UserError
from engine.tools.simulation.logs.logged_requests import MOST_TOKENS
from engine.tools.simulation.logs.read_log import Logs, read_logs
from engine.tools.simulation.parallel_runs import beside, cores
from engine.tools.simulation.simulate_scope import Setup, Simulation, fitted
from engine.tools.simulation.simulated_costs import Costs, figures, read_costs
from engine.tools.simulation.simulation_options import Wanted
from engine.tools.simulation.simulation_plot import draw
from engine.tools.simulation.simulation_report import show
from engine.tools.simulation.tally import Ran
from states.settings import Settings

MIB = 1 << 20
LONG = 1 << 23  # tokens of all runs: some seconds, which a process is worth


def run(paths: Sequence[Path], wanted: Wanted) -> int:
    """Raises Refusal or OSError."""
    if wanted.plot is not None:
        check(wanted.plot)
    logs = read_logs(paths, wanted.model, shared_head=wanted.shared_head)
    setup = build_setup(wanted, logs)
    runs = simulate(setup, logs, wanted.scopes)
    if wanted.json:
        print(json.dumps(described(wanted, logs, setup, runs), indent=2))
    else:
        show(Console(), logs, setup, runs)
    if wanted.plot is not None:
        draw(wanted.plot, runs, headline(logs, runs[0]))
    return 0


def headline(logs: Logs, run: Ran) -> str:
    figures_ = run.figures
    tokens = f"{figures_.prompt_tokens / 1e6:,.1f} million prompt tokens"
    return f"{counted(figures_.requests, 'request')} of {counted(len(logs.sessions), 'session')}, {tokens}"


def build_setup(wanted: Wanted, logs: Logs) -> Setup:
    try:
        costs = logs.measured.applied(Costs(), "recorded in the traces")
    except (ValueError, OverflowError) as error:
        raise UserError(f"the times that the traces tell cannot be: {error}") from error
    if wanted.costs is not None:
        costs = read_costs(wanted.costs, costs)
    if wanted.state_bytes is not None:
        costs = evolve(costs, state_bytes=wanted.state_bytes)
    settings = stateful(evolve(served(logs.settings), store=True, rates=costs.rates()), costs, wanted)
    if wanted.slots is not None:
        settings = evolve(settings, slots=wanted.slots)
    if wanted.min_tokens is not None:
        settings = evolve(settings, min_tokens=wanted.min_tokens)
    keep = max(1, round(wanted.prefill_keep_ratio * WHOLE))
    compression = Compression(wanted.prefill_compression, wanted.prefill_threshold, keep, freeze=wanted.freeze)
    if compression.mode != "off":
        settings = evolve(settings, drafter=MOST_TOKENS)
    elif wanted.freeze:
        raise UserError(
            "--freeze shortens messages where --prefill-compression says so: accepted with it: auto, always"
        )
    budget = wanted.budget * MIB if wanted.budget_tokens is None else wanted.budget_tokens * costs.token_bytes
    return Setup(
        fitted(settings, logs.sessions),
        costs,
        disk_budget=budget,
        host_budget=wanted.host_budget * MIB,
        restart_every=wanted.restart_every,
        interleave=wanted.interleave,
        compression=compression,
    )


def served(recorded: Settings | None) -> Settings:
    """As it was recorded, less what is not simulated, the draft and a lane of prompts' own, and what is asked for anew,
    compression.
    """
    if recorded is None:
        return Settings(slots=4, mixed_rows=64, min_tokens=512, interval=10240, cold_max=10240, state_places=8)
    plain = Settings()
    kept = ("slots", "chunk", "block_size", "keep_decoded", "batch_rows", "mixed_rows", "min_tokens")
    state = ("interval", "cold_max", "state_places")
    return evolve(plain, **{name: getattr(recorded, name) for name in (*kept, *state)})


def stateful(settings: Settings, costs: Costs, wanted: Wanted) -> Settings:
    """With positional state, if there is any; else without anything that goes with it."""
    if not costs.state_bytes:
        return evolve(settings, state_places=0)
    places = settings.state_places if wanted.state_checkpoints is None else wanted.state_checkpoints
    return evolve(settings, stateful=True, state_tokens=costs.state_tokens, state_places=places)


def simulate(setup: Setup, logs: Logs, wanted: Sequence[Scope]) -> list[Ran]:
    """A run for each scope, and before them one without any cache; side by side where they take long."""
    scopes: list[Scope | None] = [None, *wanted]

    def run(scope: Scope | None, step: Callable[[], None]) -> Ran:
        one = Simulation(setup, logs.sessions, scope, step)
        one.run()
        return one.told()

    requests = sum(session.count for session in logs.sessions)
    every = (request for session in logs.sessions for agent in session.agents for request in agent.requests)
    tokens = sum(request.length + len(request.answer) for request in every)
    with progress("simulated requests", requests * len(scopes)) as step:
        most = cores() if len(scopes) * tokens >= LONG else 1
        return beside([partial(run, scope) for scope in scopes], step, most)


def described(wanted: Wanted, logs: Logs, setup: Setup, runs: Sequence[Ran]) -> dict[str, Any]:
    """What --json prints."""
    return {
        "logs": {
            "files": logs.formats,
            "sessions": len(logs.sessions),
            "texts": logs.texts or None,
            "shared_head": wanted.shared_head,
        },
        "costs": {"source": setup.costs.source, **figures(setup.costs)},
        "settings": {
            "slots": setup.settings.slots,
            "chunk": setup.settings.chunk,
            "block_size": setup.settings.block_size,
            "min_tokens": setup.settings.min_tokens,
            "state_checkpoints": setup.settings.state_places,
            "budget_bytes": setup.disk_budget,
            "host_budget_bytes": setup.host_budget,
            "restart_every": setup.restart_every,
            "interleave": setup.interleave,
        },
        "scopes": [attrs.asdict(one.figures) for one in runs],
    }
