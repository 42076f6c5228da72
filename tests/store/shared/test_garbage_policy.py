"""Tests of which runs are marked, when they are removed, and which servers a collector waits for."""

from __future__ import annotations

import pytest

from adapters.store.shared.garbage_policy import (
    MAX_MARKED,
    SILENT_S,
    Mark,
    ServerReport,
    StoredRun,
    choose_dead_objects,
    choose_runs_to_mark,
    choose_runs_to_remove,
    review_marks,
)

OLD = 1000.0


def run(name: str, age_s: float, parent: str = "", start: int = 0, size: int = 10) -> StoredRun:
    return StoredRun(name, size, age_s, parent, start)


def report(server: str, seen: str = "", keeps: str = "", silent_s: float = 0.0) -> ServerReport:
    return ServerReport(server, frozenset(seen), frozenset(keeps), silent_s)


MARK = Mark("m", "a", frozenset("xyz"))


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [(0, ""), (30, ""), (25, "c"), (20, "cb"), (10, "cba"), (1, "cba")],
)
def test_the_oldest_leave_until_the_budget_has_a_little_room(budget: int, chosen: str) -> None:
    """A twentieth is left free, so of runs of 10 bytes 23 stay of 25, and 9 of 10."""
    runs = [run("a", 1), run("b", 2), run("c", 3)]
    assert "".join(choose_runs_to_mark(runs, budget, OLD, ())) == chosen


def test_what_is_too_old_leaves_whatever_the_budget() -> None:
    assert choose_runs_to_mark([run("a", OLD + 1), run("b", OLD)], 0, OLD, ()) == ("a",)


def test_what_others_have_marked_counts_as_gone() -> None:
    runs = [run("a", 1), run("b", 2), run("c", 3)]
    assert choose_runs_to_mark(runs, 25, OLD, {"c"}) == ()
    assert choose_runs_to_mark(runs, 15, OLD, {"c"}) == ("b",)


def test_a_run_is_as_young_as_what_continues_it() -> None:
    """An agent's head was written days ago; its last turn continues it."""
    runs = [run("head", 9, "", 0), run("middle", 8, "head", 64), run("end", 1, "middle", 128), run("other", 2)]
    assert choose_runs_to_mark(runs, 35, OLD, ()) == ("other",)
    assert choose_runs_to_mark(runs, 25, OLD, ()) == ("other", "end"), "ends go before what they stand on"


def test_a_mark_has_a_limit() -> None:
    runs = [run(f"{n:05}", OLD + 1) for n in range(2 * MAX_MARKED)]
    assert len(choose_runs_to_mark(runs, 0, OLD, ())) == MAX_MARKED


def test_a_server_keeps_what_it_uses_and_hides_the_rest() -> None:
    verdict = review_marks([MARK, Mark("n", "b", frozenset("w"))], {"x", "q"})
    assert (verdict.keeps, verdict.hidden) == (frozenset("x"), frozenset("yzw"))


@pytest.mark.parametrize(
    ("reports", "removed"),
    [
        ([report("a", "m")], "xyz"),
        ([report("a", "m"), report("b", "m", "y")], "xz"),
        ([report("a", "m"), report("b")], None),
        ([report("a", "m"), report("b", "n", "y")], None),
        ([report("a", "m"), report("b", silent_s=SILENT_S - 1)], None),
        ([report("a", "m"), report("b", silent_s=SILENT_S)], "xyz"),
        ([report("a", "m"), report("b", "m", "y", silent_s=SILENT_S)], "xyz"),
        ([report("a", "m", "xyz")], ""),
    ],
    ids=[
        "alone", "one is kept", "one has not answered", "one has seen another mark", "one is late", "one is dead",
        "what the dead kept", "all are kept",
    ],
)  # fmt: skip
def test_marked_runs_are_removed_when_all_live_servers_agree(reports: list[ServerReport], removed: str | None) -> None:
    found = choose_runs_to_remove(MARK, reports)
    assert found == (None if removed is None else frozenset(removed))


def test_the_dead_leave_nothing_behind() -> None:
    marks = [MARK, Mark("n", "b", frozenset("w")), Mark("o", "gone", frozenset("v"))]
    reports = {"a": report("a"), "b": report("b", silent_s=SILENT_S), "c": report("c", silent_s=SILENT_S)}
    assert choose_dead_objects(marks, reports) == (["n", "o"], ["c"]), "a report goes after the mark"
    assert choose_dead_objects([MARK], reports) == ([], ["b", "c"])
