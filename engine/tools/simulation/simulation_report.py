"""Prints the figures of all scopes side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from engine.settings.output.formatting import WIDTH, format_bytes, format_count, format_duration, format_percent
from engine.tools.simulation.logs.read_log import Logs
from engine.tools.simulation.simulate_scope import Setup
from engine.tools.simulation.tally import Figures, FinishedRun

ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("hit tokens", lambda figures: f"{figures.hit_tokens:,}"),
    ("  of prompt tokens", lambda figures: format_percent(figures.hit_share)),
    ("  of an infinite cache", lambda figures: f"{100 * figures.of_infinite:.2f} %"),
    ("not computed again", lambda figures: f"{figures.restored_tokens:,}"),
    ("  awaited meanwhile", lambda figures: f"{figures.followed_tokens:,}"),
    ("served once compressed", lambda figures: f"{figures.served_tokens:,}"),
    ("selected prefix, mean", lambda figures: f"{figures.selected_mean:,.0f}"),
    ("  last", lambda figures: f"{figures.selected_last:,}"),
    ("  found whole", lambda figures: f"{figures.whole_hits} of {figures.requests}"),
    ("written", lambda figures: format_bytes(figures.written_bytes)),
    ("  of that, checkpoints", lambda figures: format_bytes(figures.checkpoint_bytes)),
    ("  of unique KV bytes", lambda figures: f"{figures.written_of_unique:.3f}x"),
    ("on disk at the end", lambda figures: format_bytes(figures.disk_bytes)),
    ("evicted runs", lambda figures: f"{figures.evictions:,}"),
    ("dropped writes", lambda figures: f"{figures.dropped_writes:,}"),
    ("first token, median", lambda figures: format_duration(figures.first_token_ms[0])),
    ("  90th percentile", lambda figures: format_duration(figures.first_token_ms[1])),
)


def print_report(console: Console, logs: Logs, setup: Setup, runs: Sequence[FinishedRun]) -> None:
    if not console.is_terminal:
        console = Console(width=max(WIDTH, 24 + 14 * len(runs)))
    every = [run.figures for run in runs]
    total = every[0]
    console.print(
        f"{format_count(total.requests, 'request')} of {format_count(len(logs.sessions), 'session')}, "
        f"{format_count(total.prompt_tokens, 'prompt token')}; "
        f"an infinite cache would have had {format_percent(total.infinite_share)} of them. "
        f"Unique KV rows: {format_bytes(total.unique_bytes)}.",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for figures in every:
        table.add_column(figures.scope, justify="right")
    absent = {"checkpoint": not setup.settings.stateful, "compressed": setup.compression.mode == "off"}
    for name, cell in ROWS:
        if not any(away and word in name for word, away in absent.items()):
            table.add_row(name, *(cell(figures) for figures in every))
    console.print(table)
    for line in list_notes(logs, setup):
        console.print(line, style="dim", highlight=False)


def list_notes(logs: Logs, setup: Setup) -> list[str]:
    """Return notes on the assumptions behind the figures."""
    disk = format_bytes(setup.disk_budget)
    host = format_bytes(setup.host_budget)
    budget = f"Disk {disk}, host memory {host}, {setup.settings.serving_slots} slots"
    token = setup.costs.token_bytes
    lines = [f"{budget}; a token's rows take {token:,} bytes, so the disk has room for {setup.disk_budget // token:,}."]
    if setup.settings.stateful:
        state = setup.costs.state_bytes
        checkpoints = setup.settings.state_checkpoints
        lines.append(
            f"A checkpoint of positional state takes {state:,} bytes, and the device has {checkpoints:,} of them."
        )
    if setup.restart_every:
        lines.append(f"Restarted after every {setup.restart_every} requests: slots and host memory start empty.")
    if setup.interleave:
        lines.append(f"Sessions in rounds of {setup.interleave}, whose clocks start together.")
    lines.append(f"Times are predicted. Costs: {setup.costs.source}.")
    if (profile := setup.costs.acceptance) is not None:
        lines.append(f"Proposals of {profile.draft}: {profile.tokens_per_step:.2f} tokens a decode step.")
    if logs.texts:
        lines.append(f"Texts were read with {logs.texts}.")
    return lines
