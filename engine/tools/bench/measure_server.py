"""`rekindle bench serve`: levels of load one after the other, then table, JSON, plot, also when interrupted."""

from __future__ import annotations

import json
import secrets
from asyncio import SelectorEventLoop
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
from rich.console import Console

from engine.settings import plot_style
from engine.settings.progress import progress
from engine.settings.user_error import UserError, innermost
from engine.tools.bench.bench_figures import LoadFigures, figures
from engine.tools.bench.bench_options import Load, lengths_of
from engine.tools.bench.bench_plot import draw
from engine.tools.bench.bench_prompts import Prompts
from engine.tools.bench.bench_report import show
from engine.tools.bench.load_client import Ear, LoadClient
from engine.tools.bench.load_level import Level
from engine.tools.simulation.logs.read_log import read_logs

LEAST, EACH, AT_A_RATE = 8, 4, 32  # requests of a level, where nobody says
INTERRUPTED = 130


def run(load: Load) -> int:
    """Raises Refusal or OSError. Exit status 1 if a request failed."""
    check(load)
    sessions = read_logs(load.log).sessions if load.log else []
    prompts = Prompts(load, secrets.randbits(32) if load.seed is None else load.seed, sessions)
    levels, interrupted = list[Level](), False
    client, ear = LoadClient.of(load), Ear()
    client.clock = lambda: ear.at
    try:
        anyio.run(measure, client, prompts, levels, backend_options={"loop_factory": lambda: SelectorEventLoop(ear)})
    except KeyboardInterrupt:
        interrupted = True
    except BaseExceptionGroup as group:
        raise innermost(group) from group
    every = [figures(level) for level in levels if level.samples]
    if load.json:
        print(json.dumps(described(client, prompts, levels, every, interrupted=interrupted), indent=2))
    else:
        show(Console(), headline(client), every, notes(prompts, interrupted=interrupted))
    if load.plot is not None and every:
        draw(load.plot, levels, every, headline(client))
    return INTERRUPTED if interrupted else int(any(one.errors or one.unsent for one in every))


def check(load: Load) -> None:
    """Before anything is sent. Raises Refusal."""
    if load.plot is not None:
        plot_style.check(load.plot)
    if load.lengths_only and not load.log:
        raise UserError("--lengths-only needs --log")
    if load.rate and load.concurrency != "1":
        raise UserError("--concurrency and --rate: one of them; at a rate as many are open as come in")
    if not load.log and load.shared_prefix >= lengths_of(load.prompt_tokens)[0]:
        raise UserError(
            f"--shared-prefix {load.shared_prefix}: accepted: less than --prompt-tokens {load.prompt_tokens}"
        )


async def measure(client: LoadClient, prompts: Prompts, levels: list[Level]) -> None:
    load = client.load
    wanted = [Level(0, rate) for rate in load.rates] or [Level(streams, 0.0) for streams in load.streams]
    counts = [load.requests or (AT_A_RATE if one.rate else max(LEAST, EACH * one.streams)) for one in wanted]
    async with client.http:
        await client.meet()
        with progress("requests answered", sum(counts)) as step:
            for level, count in zip(wanted, counts, strict=True):
                levels.append(level)
                await level.run(
                    client, prompts, count, lambda level=level: step(name=f"{level.name}: requests answered")
                )


def headline(client: LoadClient) -> str:
    load = client.load
    if load.log:
        lengths = f"prompts and answers as in {', '.join(path.name for path in load.log)}"
    else:
        lengths = f"prompts of {load.prompt_tokens} tokens, answers of {load.answer_tokens}"
    return f"{client.model or 'a model'} at {load.base}, {load.api}: {lengths}"


def notes(prompts: Prompts, *, interrupted: bool) -> list[str]:
    load, lines = prompts.load, list[str]()
    if interrupted:
        lines.append("Interrupted: these are the figures until then.")
    if load.shared_prefix:
        lines.append(f"All prompts begin with the same {load.shared_prefix} tokens.")
    return [*lines, f"The same prompts again: --seed {prompts.seed}"]


def described(
    client: LoadClient, prompts: Prompts, levels: Sequence[Level], every: Sequence[LoadFigures], *, interrupted: bool
) -> dict[str, Any]:
    """What --json prints. The key of the server is nobody's business."""
    options = attrs.asdict(client.load, filter=attrs.filters.exclude("api_key", "json", "plot"))
    return {
        "url": client.load.base,
        "model": client.model,
        "seed": prompts.seed,
        "interrupted": interrupted,
        "options": {**options, "log": [path.name for path in client.load.log]},
        "levels": [{**attrs.asdict(one), "hit_share": one.hit_share} for one in every],
        "requests": {level.name: [told(level, at) for at in range(len(level.samples))] for level in levels},
    }


def told(level: Level, at: int) -> dict[str, Any]:
    """One request. Seconds from the level's beginning."""
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
