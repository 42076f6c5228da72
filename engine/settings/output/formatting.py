"""Figures as people read them, in a terminal."""

from __future__ import annotations

WIDTH = 110  # columns where there is no terminal to ask
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Return a number of bytes as people read it."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count = count / 1024
        unit = unit + 1
    return f"{count:.0f} B" if not unit else f"{count:.1f} {UNITS[unit]}"


def format_duration(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 120_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms / 60_000:.1f} min"


def format_percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
