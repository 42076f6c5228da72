"""The campaign sees what it is there to see: each part of its oracle, shown what it must refuse."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from random import Random

import pytest

from tests.campaign import case as campaign_case
from tests.campaign import run
from tests.campaign.case import WARMING, Case, Hang, Kind, Leak, Shown, Watchdog, quiet, verdict
from tests.campaign.kinds import KINDS


def warm() -> Watchdog:
    guard = Watchdog()
    for _ in range(WARMING):
        guard(lambda _: None, Random(0))
    return guard


def test_a_descriptor_that_stays_open_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign_case, "PATIENCE_S", 0.05)
    kept, guard = list[int](), warm()
    try:
        with pytest.raises(Leak):
            guard(lambda _: kept.extend(os.pipe()), Random(0))
    finally:
        for descriptor in kept:
            os.close(descriptor)
    guard(lambda _: None, Random(0))


def test_a_logged_traceback_is_shown_to_users() -> None:
    def case(_: Random) -> None:
        try:
            1 / 0  # noqa: B018 - for its exception
        except ZeroDivisionError:
            logging.getLogger("rekindle.anything").exception("a bug")

    with pytest.raises(Shown, match="a bug"):
        warm()(case, Random(0))
    with pytest.raises(Shown):
        quiet("Traceback (most recent call last):")


def test_each_error_has_its_column() -> None:
    errors = (AssertionError(), TimeoutError(), Hang(), Shown(), Leak(), KeyError())
    assert [verdict(error) for error in errors] == ["wrong", "hang", "hang", "traceback", "leak", "crash"]


def test_a_failed_case_is_told_with_its_seed_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def bench(_: Path) -> Iterator[Case]:
        def case(random: Random) -> None:
            assert random.random() == Random("5:sums:0").random()

        yield case

    monkeypatch.setattr(run, "KINDS", {"sums": Kind("sums", bench, 1)})
    hear, sender = Pipe()
    with hear, sender:
        assert run.bench(run.KINDS["sums"], 0, 9, 5, sender) == 2
        said = []
        while hear.poll():
            said.append(hear.recv())
    assert [what for what, _ in said] == ["starting", "case", "case", "failed"]
    assert (said[-1][1].case, said[-1][1].verdict) == ("5:sums:1", "wrong")
    result = run.Campaign(5, failed=[said[-1][1]])
    result.done["sums"] = 2
    assert [row["wrong"] for row in result.rows(["sums"])] == [1, 1]


def test_ten_thousand_cases_are_about_ten_thousand() -> None:
    parts = run.parts_of(10_000, list(KINDS), 2)
    assert abs(sum(part.stop - part.first for part in parts) - 10_000) < len(KINDS)
    assert {part.kind for part in parts} == set(KINDS)
