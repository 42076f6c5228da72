"""Draws how many needles were found: by depth for each length, and by length if there are several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.settings.output.plot_style import COLORS, LEFT, STYLE, save_figure, set_title

if TYPE_CHECKING:
    from engine.tools.bench.needles_cell import Cell


def draw_needles(path: Path, cells: Sequence[Cell], methods: Sequence[str], title: str) -> None:
    """Draw the picture. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415 - takes half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    fine = [cell for cell in cells if not cell.error]
    single = [cell for cell in fine if cell.depth is not None]
    several = [cell for cell in fine if cell.depth is None]
    panels = [(f"One needle, {length:,} tokens, % found", "depth", [cell for cell in single if cell.length == length])
              for length in dict.fromkeys(cell.length for cell in single)]  # fmt: skip
    if several:
        panels.append(("Several needles, % of them found", "length", several))
    with rc_context(STYLE):
        figure = Figure(figsize=(4 * max(1, len(panels)), 4.2))
        figure.subplots_adjust(left=LEFT, right=0.985, top=0.8, bottom=0.12, wspace=0.22)
        for number, (name, axis, shown) in enumerate(panels):
            panel = figure.add_subplot(1, len(panels), number + 1)
            for color, method in zip(COLORS, methods, strict=False):
                points = mean_found_by(axis, [cell for cell in shown if cell.method == method])
                panel.plot(
                    [x for x, _ in points], [100 * share for _, share in points], "o-", color=color, label=method
                )
            panel.set(title=name, xlabel="depth" if axis == "depth" else "tokens")
            panel.set_ylim(-3, 103)
            if number == 0:
                panel.legend(frameon=False, loc="lower left")
        set_title(figure, title)
        save_figure(figure, path)


def mean_found_by(axis: str, cells: Sequence[Cell]) -> list[tuple[Any, float]]:
    """Return the mean share that was found at each value of `axis`."""
    axis_values = sorted({getattr(cell, axis) for cell in cells})
    found = [[cell.found for cell in cells if getattr(cell, axis) == value] for value in axis_values]
    return [(value, sum(scores) / len(scores)) for value, scores in zip(axis_values, found, strict=True)]
