"""Draws routers side by side: what they find, their longest queue, and the times to first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.settings.output.plot_style import COLORS, INK, STYLE, save_figure, set_title
from engine.tools.simulation.fleet.fleet_tally import FinishedFleet
from engine.tools.simulation.simulation_plot import finish_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_fleet(path: Path, runs: Sequence[FinishedFleet], title: str) -> None:
    """Draw the picture. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = [run.figures.router for run in runs]
    colors = [color for color, _ in zip(COLORS * len(runs), runs, strict=False)]
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 7.6))
        figure.subplots_adjust(left=0.13, right=0.975, top=0.855, bottom=0.075, hspace=0.36, wspace=0.36)
        grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.2))
        found, queue, first = (figure.add_subplot(grid[cell]) for cell in ((0, 0), (0, 1), (1, slice(None))))
        draw_bars(found, names, [100 * run.figures.of_infinite for run in runs], colors)
        found.axvline(97, color=INK, linestyle=(0, (4, 3)), linewidth=1.2)
        found.set(title="Tokens found, % of an infinite cache's", xlim=(0, 109))
        draw_bars(queue, names, [float(run.figures.longest_queue) for run in runs], colors)
        queue.set(title="Longest queue of a replica, requests")
        for run, color in zip(runs, colors, strict=True):
            waits = sorted(max(wait, 1e-3) / 1000 for wait in run.waits_ms)
            shares = [100 * (number + 1) / len(waits) for number in range(len(waits))]
            first.step(waits, shares, where="post", color=color, label=run.figures.router, linewidth=1.8)
        finish_first(first)
        first.legend(frameon=False, loc="upper left")
        set_title(figure, title)
        save_figure(figure, path)


def draw_bars(axes: Axes, names: Sequence[str], values: Sequence[float], colors: Sequence[str]) -> None:
    """Draw a horizontal bar with its value for each name, the first one on top."""
    bars = axes.barh(range(len(names)), values, color=colors, height=0.62)
    axes.bar_label(bars, fmt=lambda value: f"{value:.4g}", padding=4, fontsize=9, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
