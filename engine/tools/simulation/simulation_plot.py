"""Draws the runs of all scopes: hit tokens and written bytes by request, and the times to first tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from engine.settings.output.plot_style import COLORS, GREY, INK, LEFT, STYLE, save_figure, set_title
from engine.tools.simulation.simulate_scope import NO_CACHE
from engine.tools.simulation.tally import FinishedRun, RequestTally

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

LINE_WIDTH = 1.8  # of a run, in points
TICKS = (
    *((10.0**power, f"{10 ** (power + 3):g} ms") for power in (-4, -3, -2, -1)),
    *((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"), (3600.0, "1 h"), (36_000.0, "10 h")),
)  # ticks in seconds


def draw_simulation(path: Path, runs: Sequence[FinishedRun], title: str) -> None:
    """Draw the picture. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context(STYLE):
        figure = Figure(figsize=(12, 7.6))
        figure.subplots_adjust(left=LEFT, right=0.975, top=0.855, bottom=0.075, hspace=0.36, wspace=0.16)
        grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
        hits, written, first = (figure.add_subplot(grid[index]) for index in ((0, slice(None)), (1, 0), (1, 1)))
        colors = dict(zip((run.name for run in runs if run.scope is not None), COLORS * len(runs), strict=False))
        order = {count.index: number for number, count in enumerate(runs[-1].counts)}
        for run in runs:
            color = colors.get(run.name, GREY)
            counts = run.counts
            draw_first(first, counts, run.name, color)
            if run.scope is not None:
                same = sorted(counts, key=lambda count: order[count.index])
                found = list_steps([count.found for count in same], 1e6)
                hits.plot(*found, color=color, label=run.name, linewidth=LINE_WIDTH)
                shown = list_written(run, counts)
                written.plot(range(len(counts) + 1), shown, color=color, label=run.name, linewidth=LINE_WIDTH)
        finish_hits(hits, runs[-1])
        finish_written(written, runs[-1])
        finish_first(first)
        set_title(figure, title)
        handles, labels = draw_legend(hits, first)
        figure.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(LEFT, 0.94),
            borderaxespad=0,
            handlelength=1.6,
            columnspacing=1.6,
            ncols=min(len(labels), 9),
            frameon=False,
        )
        save_figure(figure, path)


def list_steps(values: Sequence[int], unit: float) -> tuple[Sequence[int], list[float]]:
    """Return the points (0, 1, 2 ... requests) and the running sums of their values."""
    return range(len(values) + 1), [value / unit for value in accumulate(values, initial=0)]


def list_written(run: FinishedRun, counts: Sequence[RequestTally]) -> list[float]:
    """Return the GiB that were written before each request was sent, and in all."""
    times = [now for now, _ in run.written]
    sizes = [0, *(size for _, size in run.written)]
    return [*(sizes[bisect_right(times, count.sent)] / 2**30 for count in counts), sizes[-1] / 2**30]


def draw_first(axes: Axes, counts: Sequence[RequestTally], name: str, color: str) -> None:
    """Draw the share of requests whose first token came within this many seconds. name: of the run."""
    waits = sorted(max(count.first_ms, 1e-3) / 1000 for count in counts)
    shares = [100 * (number + 1) / len(waits) for number in range(len(waits))]
    axes.step(waits, shares, where="post", color=color, label=name, linewidth=LINE_WIDTH)


def finish_hits(axes: Axes, run: FinishedRun) -> None:
    counts = run.counts
    axes.plot(
        *list_steps([count.infinite for count in counts], 1e6),
        color=INK,
        linestyle=(0, (4, 3)),
        linewidth=1.2,
        label="infinite cache",
    )
    axes.plot(*list_steps([count.prompt for count in counts], 1e6), color=GREY, linewidth=1, label="prompt tokens")
    sent = [count.sent for count in counts]
    for number, restart in enumerate(run.restarts):
        at = bisect_right(sent, restart - 1)
        axes.axvline(at, color=GREY, linewidth=0.8, linestyle=":")
        if not number:
            axes.annotate(
                "restart",
                (at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -10),
                textcoords="offset points",
                color=GREY,
                fontsize=8,
            )
    axes.set(title="Prompt tokens that were found", ylabel="million tokens, sum", xlabel="requests")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)


def finish_written(axes: Axes, run: FinishedRun) -> None:
    unique = run.figures.unique_bytes / 2**30
    axes.axhline(unique, color=INK, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.annotate("unique KV rows", (0, unique), xytext=(4, 4), textcoords="offset points", fontsize=8, color=INK)
    axes.set(title="Written to disk", ylabel="GiB, sum", xlabel="requests sent")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)


def finish_first(axes: Axes) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xticks([seconds for seconds, _ in TICKS], [said for _, said in TICKS], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    axes.set(title="Predicted time to the first token", ylabel="% of requests within", xlabel="")
    axes.set_ylim(0, 101)


def draw_legend(*axes_list: Axes) -> tuple[list[Artist], list[str]]:
    """Return every line of the legend once, with `no cache` last."""
    found: dict[str, Artist] = {}
    for axes in axes_list:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    names = sorted(found, key=lambda name: name == NO_CACHE)
    return [found[name] for name in names], names
