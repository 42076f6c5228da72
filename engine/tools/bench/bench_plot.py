"""Draws all levels as one picture: tokens a second, times to first tokens, and times between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.settings.output.plot_style import COLORS, GREY, LEFT, STYLE, save_figure, set_title
from engine.tools.bench.bench_figures import SHARES, LoadFigures, collect_gaps
from engine.tools.bench.load_level import Level

MOST_POINTS = 2000  # points of one line


def draw_load(path: Path, levels: Sequence[Level], every: Sequence[LoadFigures], title: str) -> None:
    """Draw the picture. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415 - takes half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context(STYLE):
        figure = Figure(figsize=(12, 4.2))
        figure.subplots_adjust(left=LEFT, right=0.985, top=0.8, bottom=0.12, wspace=0.22)
        together, first, between = figure.subplots(1, 3)
        names = [figures.level for figures in every]
        together.bar(names, [figures.tokens_s for figures in every], color=COLORS[0], width=0.6, label="together")
        streams = [figures.stream_tokens_s[0] if figures.stream_tokens_s else 0.0 for figures in every]
        together.plot(names, streams, "o", color=COLORS[1], label="of a stream, p50")
        together.set(title="Tokens a second")
        together.margins(y=0.25)  # room for the legend
        together.set_axisbelow(True)
        together.legend(frameon=False, loc="upper left", ncols=2)
        for at, share in enumerate(SHARES):
            found = [(figures.level, figures.first_token_ms[at]) for figures in every if figures.first_token_ms]
            if found:
                first.plot(*zip(*found, strict=True), "o-", color=COLORS[at], label=f"p{share}")
        first.set(title="First token, ms")
        first.set_ylim(bottom=0)
        first.legend(*first.get_legend_handles_labels(), frameon=False)
        measured = [level for level in levels if level.samples]
        for at, level in enumerate(measured):
            waits = sorted(collect_gaps(level))
            shown = waits[:: max(1, len(waits) // MOST_POINTS)]
            shares = [100 * (number + 1) / len(shown) for number in range(len(shown))]
            between.step(shown, shares, where="post", color=COLORS[at % len(COLORS)], label=level.name)
        # Events that came together have no time between them.
        if any(map(any, map(collect_gaps, measured))):
            between.set_xscale("log")
            between.legend(frameon=False, loc="lower right")
        between.axhline(99, color=GREY, linewidth=0.8, linestyle=":")
        between.set(title="Next token within so many ms, %")
        between.set_ylim(0, 101)
        set_title(figure, title)
        save_figure(figure, path)
