"""Tables that benchmarks print for people, and the median that they report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows below each other. The first row names the columns."""
    print(f"\n{title}")
    if not rows:
        return
    names = list(rows[0])
    widths = [max(len(name), *(len(format_cell(row[name])) for row in rows)) for name in names]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for row in rows:
        print("  ".join(format_cell(row[name]).rjust(width) for name, width in zip(names, widths, strict=True)))


def format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
