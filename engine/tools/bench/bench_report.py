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
    ("answered", lambda figures: f"{figures.answered} of {figures.requests}"),
    *list_percentile_rows("first token", "first_token_ms", " ms"),
    *list_percentile_rows("inter-token", "inter_token_ms", " ms"),
    ("tokens an event", lambda figures: format_number(figures.tokens_an_event)),
    ("tokens/s of a stream, p50", format_percentile("stream_tokens_s", 0)),
    ("tokens/s together", lambda figures: format_number(figures.tokens_s)),
    ("requests/s", lambda figures: format_number(figures.requests_s)),
    ("prompt tokens", lambda figures: f"{figures.prompt_tokens:,}" if figures.prompt_tokens else NONE),
    ("  found in a cache", format_shared),
    ("client's own: of a core", lambda figures: format_percent(figures.busy)),
    ("  late, p99", lambda figures: format_number(figures.late_ms, " ms")),
)


def print_report(console: Console, headline: str, every: Sequence[LoadFigures], notes: Sequence[str]) -> None:
    if not console.is_terminal:
        console = Console(width=max(WIDTH, 30 + 14 * len(every)))
    console.print(headline, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for figures in every:
        table.add_column(figures.level, justify="right")
    for name, cell in ROWS:
        table.add_row(name, *(cell(figures) for figures in every))
    console.print(table)
    for line in (*list_troubles(every), *notes):
        console.print(line, highlight=False, markup=False)


def list_troubles(every: Sequence[LoadFigures]) -> list[str]:
    """Return notes on figures that are missing or doubtful."""
    lines = list[str]()
    for figures in every:
        lines += [f"{figures.level}: {count} failed: {error}" for error, count in figures.errors.items()]
        if figures.unfinished:
            lines.append(f"{figures.level}: {figures.unfinished} were unanswered when it was interrupted")
        if figures.unsent:
            lines.append(f"{figures.level}: {figures.unsent} were not sent, because too many were open")
        if figures.busy > BUSY or (figures.late_ms or 0) > LATE_MS:
            lines.append(f"{figures.level}: this client was busy or late, so the figures may be its own")
    return lines
