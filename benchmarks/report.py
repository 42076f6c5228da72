"""docs/BENCHMARKS.md and docs/BENCHMARK_RUNS.md, made from the result files: `python -m benchmarks.report`.

A test holds the pages to the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import wrap

from attrs import frozen

from benchmarks.results import PROMISES, Figure, Goal, Machine, Result, read_results

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "BENCHMARKS.md"
RUNS_PAGE = DOCS / "BENCHMARK_RUNS.md"
COLUMNS = 100  # of prose
MODULE = "python -m benchmarks."  # what commands begin with, so that the page leaves it out

HEAD = """# Benchmarks

`python -m benchmarks.report` makes this page from `benchmarks/results/*.json`. Change those files,
not this page.

Each table is about one promise. A row has what was measured, our figure, and what the same run
measured beside it. Numbers that share a row keep its order. A goal is a bound on our figure, or on
its ratio to a peer's. The last column numbers the run: its command, commit and machine are in the
[list of runs](BENCHMARK_RUNS.md).

Compare figures within a row only, since machines and hours differ. "8B shape" means random weights of such a model.
"vLLM exact" is vLLM with `VLLM_BATCH_INVARIANT=1`. What was tried and left is under
[decisions](decisions/README.md).
"""

RUNS_HEAD = f"""# Runs of the benchmarks

`python -m benchmarks.report` makes this page, too. The numbers are those of the last column in
[Benchmarks](BENCHMARKS.md). Commands begin with `{MODULE}` where no program is named.
A run without a command has its file's name.
"""


@frozen
class TableRow:
    """Figures of one run that differ only in `at`: one line of a table."""

    run: int
    figures: tuple[Figure, ...]

    @property
    def first(self) -> Figure:
        return self.figures[0]

    @property
    def missed(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.met is False)


def make_page(results: Sequence[Result]) -> str:
    """Write the tables. Figures that nothing is compared with stay in the files alone."""
    rows = [row for number, result in enumerate(select_runs(results), 1) for row in make_rows(number, result)]
    parts = [HEAD, *list_missed(rows)]
    for promise, title in PROMISES.items():
        own = [row for row in rows if row.first.promise == promise]
        if own:
            parts += [f"## {title}\n", *draw_table(own), ""]
    return wrap_prose("\n".join(parts))


def make_runs_page(results: Sequence[Result]) -> str:
    """Write the command, commit and date of each run that the tables show, by machine."""
    return wrap_prose("\n".join([RUNS_HEAD, *draw_runs(select_runs(results))]))


def select_runs(results: Sequence[Result]) -> list[Result]:
    """Leave out the runs none of whose figures is shown."""
    return [result for result in results if any(map(is_shown, result.figures))]


def wrap_prose(page: str) -> str:
    """Break the lines of a page that are too long, but for tables and code."""
    lines = list[str]()
    in_code = False
    for line in page.split("\n"):
        in_code ^= line.startswith("```")
        text = line.lstrip(" ")
        if in_code or text.startswith("|") or len(line) <= COLUMNS:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(text))
        further = indent + "  " * text.startswith(("* ", "- "))
        options = {"break_long_words": False, "break_on_hyphens": False}
        lines += wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=further, **options)
    return "\n".join(lines)


def is_shown(figure: Figure) -> bool:
    return figure.goal is not None or bool(figure.peers)


def make_rows(number: int, result: Result) -> Iterator[TableRow]:
    """Join the figures of a run that have subject, unit and goal in common."""

    def find_group(figure: Figure) -> tuple[str, str, str, Goal | None]:
        return figure.promise, figure.subject, figure.unit, figure.goal

    for _, figures in groupby(filter(is_shown, result.figures), find_group):
        yield TableRow(number, tuple(figures))


def list_missed(rows: Sequence[TableRow]) -> Iterator[str]:
    """List what is missed today, and by how much."""
    judged = [figure for row in rows for figure in row.figures if figure.met is not None]
    missed = sum(figure.met is False for figure in judged)
    yield f"## Missed today\n\n{missed} of {len(judged)} figures that have a goal miss it:\n"
    for promise, title in PROMISES.items():
        own = [row for row in rows if row.first.promise == promise and row.missed]
        if own:
            yield f"* **{title}**"
            yield from (f"  * {miss}" for miss in describe_missed(own))
    yield ""


def describe_missed(rows: Sequence[TableRow]) -> Iterator[str]:
    """Describe what rows miss. Several rows of one subject, of other machines, become one."""
    found: dict[str, list[str]] = {}
    for row in rows:
        against = row.first.goal.against if row.first.goal is not None else None
        subject = f"{row.first.subject}{f' ({against})' if against else ''}"
        found.setdefault(subject, []).extend(f"{figure.at} by {format_shortfall(figure)}" for figure in row.missed)
    for subject, points in found.items():
        yield f"{subject}: {', '.join(points)}"


def format_shortfall(figure: Figure) -> str:
    """Return how far a figure misses its goal: a share of the bound, or a factor where it is more than twice as bad."""
    value, goal = figure.compared, figure.goal
    assert value is not None
    assert goal is not None
    if not goal.bound or not value:
        return f"{format_number(abs(value - goal.bound))} {figure.unit}"
    factor = value / goal.bound if goal.at_least is None else goal.bound / value
    return f"{factor:.1f}x" if factor >= 2 else f"{100 * (factor - 1):.2g} %"


def draw_table(rows: Sequence[TableRow]) -> Iterator[str]:
    """Draw a row for each group of figures, without the bar at its end that Markdown does not need."""
    yield "| what | ours | beside it | goal | | run"
    yield "|---|---|---|---|---|---"
    for row in rows:
        first = row.first
        what = f"{first.subject}, {'/'.join(figure.at for figure in row.figures)}"
        ours = f"{join_numbers([figure.ours for figure in row.figures])} {first.unit}".strip()
        goal = "" if first.goal is None else format_goal(first.goal, len(first.peers))
        cells = (what, ours, format_peers(row.figures), goal, format_verdict(row), str(row.run))
        yield f"| {' | '.join(cells)}"


def format_peers(figures: Sequence[Figure]) -> str:
    names = dict.fromkeys(name for figure in figures for name in figure.peers)
    return "; ".join(f"{name} {join_numbers([figure.peers.get(name) for figure in figures])}" for name in names)


def format_goal(goal: Goal, peers: int) -> str:
    """Write a bound as `≤ 1.5`, `≥ vLLM` or `≤ 1.05 x`: the peer is named where there are several of them."""
    sign = "≤" if goal.at_least is None else "≥"
    if goal.against is None:
        return f"{sign} {format_number(goal.bound)}"
    if goal.bound == 1:
        return f"{sign} {goal.against}"
    return f"{sign} {format_number(goal.bound)} x{f' {goal.against}' if peers > 1 else ''}"


def format_verdict(row: TableRow) -> str:
    """Say whether the goal is met, and for a miss also where, and what the record says about it."""
    if row.first.goal is None:
        return ""
    if not row.missed:
        return "met"
    where = "" if len(row.missed) == len(row.figures) else f" at {', '.join(figure.at for figure in row.missed)}"
    return f"**missed**{where}{f' ({row.first.note})' if row.first.note else ''}"


def join_numbers(values: Sequence[float | None]) -> str:
    """Join the numbers of a row. One that all figures share is written once."""
    if len(set(values)) == 1:
        values = values[:1]
    return "/".join("-" if value is None else format_number(value) for value in values)


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_runs(results: Sequence[Result]) -> Iterator[str]:
    """List the runs of each machine: number, command or file, commit and date."""
    machines = {result.machine.name: result.machine for result in results}
    for name, machine in sorted(machines.items()):
        yield f"## {name}{describe_hardware(machine)}\n"
        for number, result in enumerate(results, 1):
            if result.machine.name == name:
                command = f"`{result.command.removeprefix(MODULE)}`" if result.command else result.benchmark
                yield f"* {number}: " + ", ".join(filter(None, (command, result.commit, result.date)))
        yield ""


def describe_hardware(machine: Machine) -> str:
    """Describe the parts that an older record tells of."""
    cores = f"{machine.cores} cores" if machine.cores else None
    gpus = f"{machine.gpus} x {machine.gpu}" if machine.gpus > 1 else machine.gpu
    found = ", ".join(filter(None, (machine.cpu, *machine.features[-1:], cores, gpus)))
    return f" ({found})" if found else ""


def main() -> None:
    results = read_results()
    PAGE.write_text(make_page(results), encoding="utf-8")
    RUNS_PAGE.write_text(make_runs_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
