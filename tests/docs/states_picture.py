"""The picture of a request's states, from `states/table.py`: `python -m tests.docs.states_picture` (`make diagram`).

The places of the states, and the ways of the lines that need one, are chosen by hand below. Which lines there are, and
what is written on them, comes from the table: a transition that has no line here raises KeyError.

The states of an ordinary life stand in one column, in the order of `states/request_states.py`. Lines on the left skip
phases, or go back to an earlier one. On the right are the states of requests that end early or have lost their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from pathlib import Path

from attrs import frozen

from states.diagram import list_edges
from states.machine import Table
from states.table import TABLE

IMAGES = Path(__file__).parents[2] / "docs" / "images"
LIFE = (
    *("New", "Waiting", "LookingUp", "Restoring", "LoadingScorer", "Compressing", "UnloadingScorer", "UnparkingDraft"),
    *("Prefilling", "Speculating", "Snapshotting", "Parking", "Done"),
)
PITCH, HEIGHT, WIDTH = 54, 30, 150  # pixels: between rows, and of a box
LEFT, RIGHT = 250, 700  # left edges of both columns
ROW = {name: 28 + PITCH * number for number, name in enumerate(LIFE)}  # top edges
ROW |= {"Recovering": ROW["Compressing"], "Yielding": ROW["UnloadingScorer"], "Draining": ROW["Speculating"]}
SIZE = (960, ROW["Done"] + HEIGHT + 44)
LOST_BUS, CANCELLED_BUS = 650, 672  # where the lines to Recovering and to Draining go down
# Lines that leave a state of the right column: the point of the box where each begins, and where it turns.
TURNS: Mapping[tuple[str, str], tuple[int, int]] = {
    ("Recovering", "Waiting"): (60, 0),
    ("Recovering", "Yielding"): (40, 0),
    ("Yielding", "Waiting"): (WIDTH, 16),
    ("Yielding", "Parking"): (WIDTH, 64),
    ("Recovering", "Draining"): (WIDTH, 40),
    ("Draining", "Snapshotting"): (40, 0),
    ("Draining", "Parking"): (70, 0),
    ("Draining", "Done"): (100, 0),
}


@frozen
class Palette:
    """The colours of one picture."""

    ink: str
    paper: str
    box: str
    edge: str
    skip: str
    lost: str
    cancelled: str


PALETTES = {
    "light": Palette("#1f2328", "#ffffff", "#eef2f6", "#57606a", "#8c959f", "#0b62c4", "#b35900"),
    "dark": Palette("#e6edf3", "#0d1117", "#1c2430", "#9198a1", "#6e7681", "#6cb2ff", "#f0a35e"),
}
MARKERS = ("edge", "skip", "lost", "cancelled")


def middle(state: str) -> int:
    return ROW[state] + HEIGHT // 2


def draw_edge(source: str, target: str) -> tuple[str, str]:
    """Return the path of a line, and the name of its colour."""
    if source == target:
        x, y = (LEFT + 14 if source in LIFE else RIGHT + WIDTH - 28), ROW[source]
        return f"M{x} {y} v-9 h14 v7", "edge"
    if source in LIFE and target in LIFE:
        return draw_between_phases(source, target)
    if source in LIFE:
        return draw_to_bus(source, target)
    return draw_from_right_column(source, target)


def draw_from_right_column(source: str, target: str) -> tuple[str, str]:
    """Return a line that leaves one of the states for requests that end early or have lost their rows."""
    start, turn = TURNS[source, target]
    x, right = RIGHT + start, RIGHT + WIDTH + turn
    down = f"M{x} {ROW[source] + HEIGHT} V"
    if target == "Draining":
        return f"M{x} {middle(source)} H{right} V{middle(target)} H{RIGHT + WIDTH + 2}", "cancelled"
    if target == "Yielding":
        return f"{down}{ROW[target] - 2}", "lost"
    colour = "lost" if target == "Waiting" else "cancelled"
    if turn:
        return f"M{x} {middle(source)} H{right} V{middle(target) + 8} H{LEFT + WIDTH + 2}", colour
    if target == "Waiting":
        return f"M{x} {ROW[source]} V{middle(target) - 6} H{LEFT + WIDTH + 2}", colour
    return f"{down}{middle(target)} H{LEFT + WIDTH + 2}", colour


def draw_between_phases(source: str, target: str) -> tuple[str, str]:
    """Return a straight line to the next phase, or a curve on the left: it skips phases, or goes back."""
    step = LIFE.index(target) - LIFE.index(source)
    if step == 1:
        return f"M{LEFT + WIDTH // 2} {ROW[source] + HEIGHT} V{ROW[target] - 2}", "edge"
    depth = 18 + 17 * abs(step)
    start, stop = (middle(source) + 4, middle(target) - 4) if step > 0 else (middle(source) - 9, middle(target) + 9)
    bend = LEFT - depth
    return f"M{LEFT} {start} C{bend} {start} {bend} {stop} {LEFT - 2} {stop}", "skip"


def draw_to_bus(source: str, target: str) -> tuple[str, str]:
    """Return a line to the right column, most of which is shared with those of other states."""
    if target == "Yielding":
        return f"M{LEFT + WIDTH} {middle(source)} H{RIGHT - 2}", "lost"
    bus, y, colour = (
        (CANCELLED_BUS, middle(source) + 5, "cancelled")
        if target == "Draining"
        else (LOST_BUS, middle(source) - 5, "lost")
    )
    return f"M{LEFT + WIDTH} {y} H{bus} V{middle(target)} H{RIGHT - 2}", colour


def render_picture(rows: Table, colours: Palette) -> str:
    """Return the picture as SVG text."""
    return "\n".join(render_lines(list_edges(rows), colours)) + "\n"


def render_lines(edges: Mapping[tuple[str, str], list[str]], colours: Palette) -> Iterator[str]:
    width, height = SIZE
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    yield '  font-family="system-ui, sans-serif" font-size="12">'
    yield "<title>The states of a request, and the events that lead from one to the next</title>"
    yield f'<rect width="{width}" height="{height}" fill="{colours.paper}"/>'
    for name in MARKERS:
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{getattr(colours, name)}"/></marker>'
        )
    for (source, target), events in edges.items():
        path, colour = draw_edge(source, target)
        yield (
            f'<path d="{path}" fill="none" stroke="{getattr(colours, colour)}" marker-end="url(#{colour})">'
            f"<title>{source} to {target}: {', '.join(events)}</title></path>"
        )
    for state in dict.fromkeys(name for pair in edges for name in pair):
        x, y = (LEFT if state in LIFE else RIGHT), ROW[state]
        yield (
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{colours.box}"'
            f' stroke="{colours.edge}"/>'
        )
        yield (
            f'<text x="{x + WIDTH // 2}" y="{y + 20}" text-anchor="middle" font-size="13" font-weight="600"'
            f' fill="{colours.ink}">{state}</text>'
        )
    for source, target in pairwise(LIFE):
        text = escape(", ".join(edges[source, target]))
        yield f'<text x="{LEFT + WIDTH // 2 + 8}" y="{ROW[target] - 8}" fill="{colours.ink}">{text}</text>'
    labels = (
        (14, colours.edge, "Curves: phases are skipped, or a prompt is looked up again"),
        (LEFT + WIDTH + 8, colours.lost, "Blue: the rows of the slot are lost"),
        (RIGHT - 28, colours.cancelled, "Orange: ends early, with work in flight"),
    )
    for x, colour, text in labels:
        yield f'<text x="{x}" y="{SIZE[1] - 12}" fill="{colour}">{text}</text>'
    yield "</svg>"


def main() -> None:
    for name, colours in PALETTES.items():
        (IMAGES / f"states-{name}.svg").write_text(render_picture(TABLE, colours))


if __name__ == "__main__":
    main()
