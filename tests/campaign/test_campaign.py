"""A few cases of each kind, the same ones each time; thousands by hand (`python -m tests.campaign.run`)."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.campaign.case import Kind, Watchdog, seed_of
from tests.campaign.hostile import spoilt_cases
from tests.campaign.kinds import DECODERS, KINDS

MANY = 1000
# By default `tests/http/wire` has such clients and crowds of connections, and
# `tests/http/request/test_fuzzed_requests.py` such bodies.
WITH_OWN_TESTS = ("attacks", "bodies", "crowds")
SEED = 1


@pytest.fixture(autouse=True)
def spare_the_collector() -> None:
    """Leave what exists out of the collections between cases: each would look through all of it."""
    gc.collect()
    gc.freeze()


def named(kind: Kind) -> str:
    return kind.name


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if kind.name in WITH_OWN_TESTS else ())
        for kind in KINDS.values()
        if kind not in DECODERS
    ],
    ids=lambda kind: kind.name,
)
def test_a_few(kind: Kind, tmp_path: Path) -> None:
    """Each case asserts its own oracle, and the watchdog raises what all kinds share."""
    guard = Watchdog()
    with kind.bench(tmp_path) as case:
        for number in range(kind.few):
            guard(case, Random(seed_of(SEED, kind.name, number)))
    assert guard.run == kind.few > 0


@pytest.mark.parametrize("kind", DECODERS, ids=named)
@pytest.mark.parametrize("examples", [0, pytest.param(MANY, marks=(pytest.mark.long, pytest.mark.timeout(0)))])
def test_decoders(kind: Kind, examples: int, tmp_path: Path) -> None:
    """With hypothesis, which makes what it finds smaller."""
    guard = Watchdog()
    with kind.bench(tmp_path) as case:
        spoilt_cases(lambda random: guard(case, random), examples or kind.few)
    assert guard.run >= (examples or kind.few)


def test_cases_that_look_for_new_code() -> None:
    """This takes a process of its own, because it instruments what it imports, and ends the process."""
    pytest.importorskip("atheris", reason="coverage-guided cases need atheris")
    words = [sys.executable, "-m", "tests.campaign.guided", "seek tables", "-runs=64"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done 64 runs" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(0)
def test_thousands() -> None:
    from tests.campaign.run import campaign  # noqa: PLC0415

    assert not campaign(cases=10_000, seed=int(time.time()), processes=2).failed
