"""docs/BENCHMARKS.md and the README's chart are what the result files make of them."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from benchmarks.chart import IMAGES, SCHEMES, collect_panels, describe_panels, draw_chart
from benchmarks.report import PAGE, RUNS_PAGE, make_page, make_runs_page
from benchmarks.results import PROMISES, Figure, Goal, Machine, Result, read_results
from tests.pairs import with_first

README = PAGE.parents[1] / "README.md"
MOST_BYTES = 25 * 1024
MACHINE = Machine("epyc-avx2-2", "AMD EPYC", ["avx2"], 2)


def make_result(*figures: Figure, command: str | None = "python -m benchmarks.steps --runs 3") -> Result:
    return Result("steps", command, "abc1234", "2026-11-28", MACHINE, {}, list(figures), None)


def test_the_page_is_what_the_files_say() -> None:
    results = read_results()
    assert PAGE.read_text(encoding="utf-8") == make_page(results), "run: make figures"
    assert RUNS_PAGE.read_text(encoding="utf-8") == make_runs_page(results), "run: make figures"


def test_the_page_can_be_read_in_a_sitting() -> None:
    assert len(PAGE.read_bytes()) <= MOST_BYTES


def test_the_page_has_a_table_for_each_promise() -> None:
    titles = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == ["Missed today", *PROMISES.values()]


def test_figures_of_one_subject_share_a_row_beside_their_peers() -> None:
    goal = Goal(at_least=1, against="vLLM")
    figures = [
        Figure("decode", "8B", at, "tok/s", ours, {"vLLM": peer}, goal)
        for at, ours, peer in (("2k", 245, 189), ("64k", 1500, 2000))
    ]
    page = make_page([make_result(*figures)])
    assert "| 8B, 2k/64k | 245/1,500 tok/s | vLLM 189/2,000 | ≥ vLLM | **missed** at 64k | 1\n" in page
    assert "* **Decode**\n  * 8B (vLLM): 64k by 33 %" in page
    assert "1 of 2 figures that have a goal miss it:" in page
    runs = make_runs_page([make_result(*figures)])
    assert "## epyc-avx2-2 (AMD EPYC, avx2, 2 cores)" in runs
    assert "* 1: `steps --runs 3`, abc1234, 2026-11-28" in runs


@pytest.mark.parametrize(
    ("figure", "listed"),
    [
        (Figure("streams", "8B", "32", "x", 2.1, goal=Goal(at_most=1.5)), "8B: 32 by 40 %"),
        (Figure("streams", "8B", "32", "s", 8.4, goal=Goal(at_most=1)), "8B: 32 by 8.4x"),
        (Figure("streams", "8B", "q4", "%", 27, goal=Goal(at_least=70)), "8B: q4 by 2.6x"),
        (Figure("exactness", "8B", "nine ways", "of 9,000 differ", 3, goal=Goal(at_most=0)), "nine ways by 3 of 9,000"),
    ],
)
def test_a_miss_is_told_by_how_much(figure: Figure, listed: str) -> None:
    assert listed in make_page([make_result(figure)])


def test_a_figure_that_nothing_is_compared_with_stays_in_its_file() -> None:
    results = [make_result(Figure("start", "demo", "first", "s", 71.7))]
    assert "71.7" not in make_page(results)
    assert "steps" not in make_runs_page(results)


def test_a_run_without_a_command_is_named_by_its_file() -> None:
    figure = Figure("start", "8B", "second", "s", 3, goal=Goal(at_most=5))
    page = make_runs_page([make_result(figure, command=None)])
    assert "* 1: steps, abc1234, 2026-11-28" in page


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_chart_shows_what_the_files_say(scheme: str) -> None:
    drawn = (IMAGES / f"figures-{scheme}.svg").read_text(encoding="utf-8")
    assert describe_panels(collect_panels(read_results())) in unescape(drawn), "run: make figures"


@with_first("scheme")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_chart_is_drawn_anew(scheme: str, tmp_path: Path) -> None:
    draw_chart(collect_panels(read_results()), scheme, tmp_path / "anew.svg")
    assert (tmp_path / "anew.svg").read_text(encoding="utf-8").count("<path") > 10


def test_the_readme_says_in_words_what_its_chart_shows() -> None:
    assert f'alt="{describe_panels(collect_panels(read_results()))}"' in README.read_text(encoding="utf-8")
