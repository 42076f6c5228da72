"""Prints the figures of all levels side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from engine.settings.output.formatting import WIDTH, format_percent
from engine.tools.bench.bench_figures import SHARES, LoadFigures

# The share of a core from which on, and the 99th percentile of lateness, the client itself explains the figures.
BUSY = 0.5
LATE_MS = 5.0
NONE = "-"


def format_number(value: float | None, unit: str = "") -> str:
    """Return a number with three significant digits."""
    if value is None:
        return NONE
    return (f"{value:,.0f}" if value >= 100 else f"{value:.3g}") + unit


def format_percentile(name: str, at: int, unit: str = "") -> Callable[[LoadFigures], str]:
    def cell(figures: LoadFigures) -> str:
        values = getattr(figures, name)
        return format_number(values[at] if values else None, unit)

    return cell


def format_shared(figures: LoadFigures) -> str:
    return NONE if figures.hit_share is None else format_percent(figures.hit_share)


def list_percentile_rows(title: str, name: str, unit: str) -> tuple[tuple[str, Callable[[LoadFigures], str]], ...]:
    return tuple(
        (f"{'' if at else title} p{share}".strip() if not at else f"  p{share}", format_percentile(name, at, unit))
        for at, share in enumerate(SHARES)
    )


ROWS: tuple[tuple[str, Callable[[LoadFigures], str]], ...] = (
    ("answered", lambda one: f"{one.answered} of {one.requests}"),
    *list_percentile_rows("first token", "first_token_ms", " ms"),
    *list_percentile_rows("inter-token", "inter_token_ms", " ms"),
    ("tokens an event", lambda one: format_number(one.tokens_an_event)),
    ("tokens/s of a stream, p50", format_percentile("stream_tokens_s", 0)),
    ("tokens/s together", lambda one: format_number(one.tokens_s)),
    ("requests/s", lambda one: format_number(one.requests_s)),
    ("prompt tokens", lambda one: f"{one.prompt_tokens:,}" if one.prompt_tokens else NONE),
    ("  found in a cache", format_shared),
    ("client's own: of a core", lambda one: format_percent(one.busy)),
    ("  late, p99", lambda one: format_number(one.late_ms, " ms")),
)


def print_report(console: Console, headline: str, every: Sequence[LoadFigures], notes: Sequence[str]) -> None:
    if not console.is_terminal:
        console = Console(width=max(WIDTH, 30 + 14 * len(every)))
    console.print(headline, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for one in every:
        table.add_column(one.level, justify="right")
    for name, cell in ROWS:
        table.add_row(name, *(cell(one) for one in every))
    console.print(table)
    for line in (*list_troubles(every), *notes):
        console.print(line, highlight=False, markup=False)


def list_troubles(every: Sequence[LoadFigures]) -> list[str]:
    """Return notes on figures that are missing or doubtful."""
    lines = list[str]()
    for one in every:
        lines += [f"{one.level}: {count} failed: {error}" for error, count in one.errors.items()]
        if one.unfinished:
            lines.append(f"{one.level}: {one.unfinished} were unanswered when it was interrupted")
        if one.unsent:
            lines.append(f"{one.level}: {one.unsent} were not sent, because too many were open")
        if one.busy > BUSY or (one.late_ms or 0) > LATE_MS:
            lines.append(f"{one.level}: this client was busy or late, so the figures may be its own")
    return lines
