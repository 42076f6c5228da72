"""The figures of all scopes side by side, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from engine.settings.formatting import WIDTH, counted, duration, percent, size
from engine.tools.simulation.logs.read_log import Logs
from engine.tools.simulation.simulate_scope import Setup
from engine.tools.simulation.tally import Figures, Ran

ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("hit tokens", lambda one: f"{one.hit_tokens:,}"),
    ("  of prompt tokens", lambda one: percent(one.hit_share)),
    ("  of an infinite cache", lambda one: f"{100 * one.of_infinite:.2f} %"),
    ("not computed again", lambda one: f"{one.restored_tokens:,}"),
    ("served once compressed", lambda one: f"{one.served_tokens:,}"),
    ("selected prefix, mean", lambda one: f"{one.selected_mean:,.0f}"),
    ("  last", lambda one: f"{one.selected_last:,}"),
    ("  found whole", lambda one: f"{one.whole_hits} of {one.requests}"),
    ("written", lambda one: size(one.written_bytes)),
    ("  of that, checkpoints", lambda one: size(one.checkpoint_bytes)),
    ("  of unique KV bytes", lambda one: f"{one.written_of_unique:.3f}x"),
    ("on disk at the end", lambda one: size(one.disk_bytes)),
    ("evicted runs", lambda one: f"{one.evictions:,}"),
    ("dropped writes", lambda one: f"{one.dropped_writes:,}"),
    ("first token, median", lambda one: duration(one.first_token_ms[0])),
    ("  90th percentile", lambda one: duration(one.first_token_ms[1])),
)


def show(console: Console, logs: Logs, setup: Setup, runs: Sequence[Ran]) -> None:
    if not console.is_terminal:
        console = Console(width=max(WIDTH, 24 + 14 * len(runs)))
    every = [one.figures for one in runs]
    total = every[0]
    console.print(
        f"{counted(total.requests, 'request')} of {counted(len(logs.sessions), 'session')}, "
        f"{counted(total.prompt_tokens, 'prompt token')}; "
        f"an infinite cache would have had {percent(total.infinite_share)} of them. "
        f"Unique KV rows: {size(total.unique_bytes)}.",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for one in every:
        table.add_column(one.scope, justify="right")
    absent = {"checkpoint": not setup.settings.stateful, "compressed": setup.compression.mode == "off"}
    for name, cell in ROWS:
        if not any(away and word in name for word, away in absent.items()):
            table.add_row(name, *(cell(one) for one in every))
    console.print(table)
    for line in notes(logs, setup):
        console.print(line, style="dim", highlight=False)


def notes(logs: Logs, setup: Setup) -> list[str]:
    """What the figures rest on."""
    budget = f"Disk {size(setup.disk_budget)}, host memory {size(setup.host_budget)}, {setup.settings.slots} slots"
    token = setup.costs.token_bytes
    lines = [f"{budget}; a token's rows take {token:,} bytes, so the disk has room for {setup.disk_budget // token:,}."]
    if setup.settings.stateful:
        state, places = setup.costs.state_bytes, setup.settings.state_places
        lines.append(
            f"A checkpoint of positional state takes {state:,} bytes; {counted(places, 'place')} on the device."
        )
    if setup.restart_every:
        lines.append(f"Restarted after every {setup.restart_every} requests: slots and host memory start empty.")
    if setup.interleave:
        lines.append(f"Sessions in rounds of {setup.interleave}, whose clocks start together.")
    lines.append(f"Times are predicted. Costs: {setup.costs.source}.")
    if logs.texts:
        lines.append(f"Texts were read with {logs.texts}.")
    return lines
