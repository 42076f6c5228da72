"""`rekindle bench serve`: runs levels of load in turn and reports them as table, JSON and plot, even if interrupted."""

from __future__ import annotations

import json
import secrets
from asyncio import SelectorEventLoop
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
from rich.console import Console

from engine.settings.output import plot_style
from engine.settings.output.progress import count_progress
from engine.settings.user_error import UserError, find_innermost
from engine.tools.bench.bench_figures import LoadFigures, compute_figures
from engine.tools.bench.bench_options import ArrivalOptions, LoadOptions, parse_lengths
from engine.tools.bench.bench_plot import draw_load
from engine.tools.bench.bench_prompts import Prompts
from engine.tools.bench.bench_report import print_report
from engine.tools.bench.load_client import LoadClient, TimestampSelector
from engine.tools.bench.load_level import Level
from engine.tools.simulation.logs.read_log import read_logs

# The fewest requests of a level by default.
LEAST = 8
EACH = 4
AT_A_RATE = 32
INTERRUPTED = 130


def run_bench(load: LoadOptions) -> int:
    """Run a load and report it. Raises UserError or OSError. The exit status is 1 if a request failed."""
    check_options(load)
    requests = load.requests
    sessions = read_logs(requests.log).sessions if requests.log else []
    prompts = Prompts(requests, secrets.randbits(32) if requests.seed is None else requests.seed, sessions)
    levels = list[Level]()
    interrupted = False
    selector = TimestampSelector()
    client = LoadClient.from_options(load.server, requests, lambda: selector.at)
    try:
        anyio.run(
            measure_levels,
            client,
            prompts,
            load.arrivals,
            levels,
            backend_options={"loop_factory": lambda: SelectorEventLoop(selector)},
        )
    except KeyboardInterrupt:
        interrupted = True
    except BaseExceptionGroup as group:
        raise find_innermost(group) from group
    every = [compute_figures(level) for level in levels if level.samples]
    if load.output.json:
        print(json.dumps(build_json(load, client, prompts, levels, every, interrupted=interrupted), indent=2))
    else:
        print_report(Console(), describe_run(client), every, list_notes(prompts, interrupted=interrupted))
    if load.output.plot is not None and every:
        draw_load(load.output.plot, levels, every, describe_run(client))
    return INTERRUPTED if interrupted else int(any(figures.errors or figures.unsent for figures in every))


def check_options(load: LoadOptions) -> None:
    """Check the options before anything is sent. Raises UserError."""
    if load.output.plot is not None:
        plot_style.check_plot_path(load.output.plot)
    requests = load.requests
    if requests.lengths_only and not requests.log:
        raise UserError("--lengths-only needs --log")
    if load.arrivals.rate and load.arrivals.concurrency != "1":
        raise UserError("use either --concurrency or --rate")
    if not requests.log and requests.shared_prefix >= parse_lengths(requests.prompt_tokens)[0]:
        raise UserError(
            f"--shared-prefix {requests.shared_prefix}: accepted: less than --prompt-tokens {requests.prompt_tokens}"
        )


async def measure_levels(client: LoadClient, prompts: Prompts, arrivals: ArrivalOptions, levels: list[Level]) -> None:
    wanted = [Level(0, rate) for rate in arrivals.rates] or [Level(streams, 0.0) for streams in arrivals.streams]
    counts = [arrivals.requests or (AT_A_RATE if level.rate else max(LEAST, EACH * level.streams)) for level in wanted]
    async with client:
        await client.find_model()
        with count_progress("requests answered", sum(counts)) as step:
            for level, count in zip(wanted, counts, strict=True):
                levels.append(level)
                await level.run(
                    client,
                    prompts,
                    count,
                    arrivals.warm_up,
                    lambda level=level: step(name=f"{level.name}: requests answered"),
                )


def describe_run(client: LoadClient) -> str:
    requests = client.requests
    if requests.log:
        lengths = f"prompts and answers as in {', '.join(path.name for path in requests.log)}"
    else:
        lengths = f"prompts of {requests.prompt_tokens} tokens, answers of {requests.answer_tokens}"
    return f"{client.model or 'a model'} at {client.server.base}, {client.server.api}: {lengths}"


def list_notes(prompts: Prompts, *, interrupted: bool) -> list[str]:
    lines = list[str]()
    if interrupted:
        lines.append("Interrupted: these are the figures so far.")
    if prompts.requests.shared_prefix:
        lines.append(f"All prompts begin with the same {prompts.requests.shared_prefix} tokens.")
    return [*lines, f"To repeat these prompts: --seed {prompts.seed}"]


def build_json(
    load: LoadOptions,
    client: LoadClient,
    prompts: Prompts,
    levels: Sequence[Level],
    every: Sequence[LoadFigures],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """Return what --json prints. The key of the server is left out."""
    shown = attrs.filters.exclude("api_key")
    groups = (load.server, load.arrivals, load.requests)
    options = {name: value for group in groups for name, value in attrs.asdict(group, filter=shown).items()}
    return {
        "url": client.server.base,
        "model": client.model,
        "seed": prompts.seed,
        "interrupted": interrupted,
        "options": {**options, "log": [path.name for path in load.requests.log]},
        "levels": [{**attrs.asdict(level_figures), "hit_share": level_figures.hit_share} for level_figures in every],
        "requests": {
            level.name: [build_request_json(level, at) for at in range(len(level.samples))] for level in levels
        },
    }


def build_request_json(level: Level, at: int) -> dict[str, Any]:
    """Return one request. Times are seconds from the beginning of its level."""
    sample = level.samples[at]
    return {
        "sent_s": round(sample.sent - level.began, 6),
        "first_token_ms": None if sample.first is None else round(1e3 * sample.first, 3),
        "ended_s": round(sample.ended - level.began, 6) if sample.ended else None,
        "prompt_tokens": sample.prompt,
        "cached_tokens": sample.cached,
        "answer_tokens": sample.tokens,
        "events": len(sample.times),
        "error": sample.error or None,
    }
