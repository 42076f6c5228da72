"""The chart of the README, drawn from the result files, light and dark: `python -m benchmarks.chart`.

Each panel is one measurement, so all of its bars come from one run. A test holds the pictures to the files: what they
show is written in words in their metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from benchmarks.results import Figure, Result, read_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = Path(__file__).parents[1] / "docs" / "images"
OURS = "Rekindle"
NAMES = {"vLLM exact": "vLLM, exact mode"}
SCHEMES = {
    "light": {"ink": "#22262B", "muted": "#5F6670", "ours": "#D9480F", "peer": "#A9B0B9"},
    "dark": {"ink": "#E6E8EB", "muted": "#A5ADB8", "ours": "#FF7A3D", "peer": "#5C6570"},
}
STYLE: Any = {"font.size": 11.5, "font.family": "sans-serif", "svg.fonttype": "path", "svg.hashsalt": "rekindle"}
WIDTH, HEIGHT = 8.9, 6.0  # inches: 800 pixels wide at 90 a inch
LABELS = -0.7  # where names of bars begin, in widths of a panel's axes: headings begin there, too


@frozen
class Bar:
    """One measured number and whose it is."""

    name: str
    value: float
    ours: bool


@frozen
class Panel:
    """Numbers of one unit from one run."""

    title: str
    subject: str
    unit: str
    better: str
    bars: tuple[Bar, ...]


def find_figure(results: Sequence[Result], name: str, subject: str, at: str) -> Figure:
    """Raises LookupError where the files no longer hold what the chart shows."""
    for result in results:
        for figure in result.figures:
            if (result.name, figure.subject, figure.at) == (name, subject, at):
                return figure
    raise LookupError(f"{name} has no figure of {subject}, {at}")


def compare_bars(figure: Figure, names: Sequence[str]) -> tuple[Bar, ...]:
    """Our bar, and those of some peers of the same run."""
    assert figure.ours is not None
    peers = [Bar(NAMES.get(name, name), figure.peers[name], ours=False) for name in names]
    return Bar(OURS, figure.ours, ours=True), *peers


def name_restored(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """Name what each server did with a prompt that it had read before a restart."""
    names = {OURS: "Rekindle, from disk", "vLLM": "vLLM, read again", "cold": "Rekindle, read again"}
    return tuple(evolve(bar, name=names[bar.name]) for bar in bars)


def collect_panels(results: Sequence[Result]) -> list[Panel]:
    vllm, llama = "vllm-8b-h200", "peer-8b-shape-h200"
    decode = find_figure(results, vllm, "8B shape, behind", "2k")
    streams = find_figure(results, llama, "8B shape, streams of 1k, together", "8")
    restart = find_figure(results, vllm, "8B shape, first token after a restart", "32k")
    cold = find_figure(results, vllm, "8B shape, first token", "32k")
    hybrid = find_figure(results, "hybrid-bf16-h200", "27B shape, first token after kill -9", "32768")
    agents = find_figure(results, "peer-8b-shape-vllm-h200", "8B shape, 16 sessions that begin together", "whole run")
    ready = find_figure(results, vllm, "8B shape, ready", "second")
    assert cold.ours is not None
    # vLLM keeps nothing over a restart in that run, so it reads the prompt again.
    restored, again = compare_bars(restart, ["vLLM"])
    own = Bar("cold", cold.ours / 1000, ours=False)
    exact = ["vLLM", "vLLM exact"]
    restarts = "First token after a restart"
    return [
        Panel("Decoding", "8B behind 2,000 tokens", "tokens/s", "more", compare_bars(decode, exact)),
        Panel("Eight streams", "8B, prompts of 1,000", "tokens/s", "more", compare_bars(streams, ["llama.cpp"])),
        Panel(restarts, "8B, 32,000 tokens", "seconds", "less", name_restored((restored, again, own))),
        Panel(restarts, "27B hybrid, 32,768 tokens", "seconds", "less", name_restored(compare_bars(hybrid, ["cold"]))),
        Panel("Sixteen agents that begin together", "8B, six turns", "seconds", "less", compare_bars(agents, ["vLLM"])),
        Panel("Ready again", "8B, second start", "seconds", "less", compare_bars(ready, ["vLLM"])),
    ]


def describe_panels(panels: Sequence[Panel]) -> str:
    """Say in words what the chart shows. It is the alt text of the README, too."""
    parts = (
        f"{panel.title} ({panel.subject}; {panel.unit}, {panel.better} is better): "
        + ", ".join(f"{bar.name} {format_value(bar.value)}" for bar in panel.bars)
        for panel in panels
    )
    return "; ".join(parts)


def format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_panel(axes: Axes, panel: Panel, colors: dict[str, str]) -> None:
    """Horizontal bars, each with its name before it and its number behind it."""
    most = max(bar.value for bar in panel.bars)
    for row, bar in enumerate(panel.bars):
        axes.barh(row, bar.value, height=0.62, color=colors["ours" if bar.ours else "peer"])
        weight = "bold" if bar.ours else "normal"
        text = format_value(bar.value)
        axes.text(bar.value + most * 0.025, row, text, va="center", color=colors["ink"], fontweight=weight)
    subtitle = f"{panel.subject}: {panel.unit}, {panel.better} is better"
    heading = {"transform": axes.transAxes, "va": "bottom"}
    axes.text(LABELS, 1.19, panel.title, fontsize=13, fontweight="bold", color=colors["ink"], **heading)
    axes.text(LABELS, 1.04, subtitle, fontsize=10, color=colors["muted"], **heading)
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars], color=colors["ink"])
    axes.set_ylim(2.6, -0.6)  # room for three bars, so that bars are as thick in every panel
    axes.set_xlim(0, most * 1.24)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.patch.set_alpha(0)
    for side in axes.spines.values():
        side.set_visible(False)


def draw_chart(panels: Sequence[Panel], scheme: str, path: Path) -> None:
    from matplotlib import rc_context  # noqa: PLC0415 - takes a second, and what else is here needs none of it
    from matplotlib.figure import Figure as Picture  # noqa: PLC0415 - as above

    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, HEIGHT))
        picture.patch.set_alpha(0)
        rows = -(-len(panels) // 2)
        for number, panel in enumerate(panels, 1):
            draw_panel(picture.add_subplot(rows, 2, number), panel, SCHEMES[scheme])
        picture.subplots_adjust(left=0.2, right=0.965, top=0.9, bottom=0.02, hspace=0.66, wspace=0.82)
        picture.savefig(path, metadata={"Date": None, "Description": describe_panels(panels)})


def main() -> None:
    panels = collect_panels(read_results())
    for scheme in SCHEMES:
        draw_chart(panels, scheme, IMAGES / f"figures-{scheme}.svg")
    print(describe_panels(panels))


if __name__ == "__main__":
    main()
