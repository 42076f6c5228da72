"""Shared by all tests: the async backend, the cores, and the choice of tests that this machine and this run can do."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import engine  # noqa: F401 - before torch: how its threads wait
from tests.compile_once import compile_modules
from tests.examples import register_profiles
from tests.pairs import is_usual

# Before torch is imported, here and by what a test starts: threads of several workers that wait for each other on the
# same cores take longer than one each. Tests of what threads do to numbers say how many they want.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# What is imported is compiled once, and not by each process that a test starts, whatever an image's environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

register_profiles()

LEFT_OUT = pytest.StashKey[Counter[str]]()  # numbers of tests that are not run, by the reason
MARGIN_S = 10  # by which a test that waits is cancelled before its time limit


def pytest_xdist_setupnodes() -> None:
    """Called in the process that starts the workers, before it has other threads."""
    compile_modules()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """For tensors: what several of them do to numbers has to be seen where a worker has one core, too."""
    import torch  # noqa: PLC0415 - as below

    torch.set_num_threads(max(2, before := torch.get_num_threads()))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def confined_processes_are_forked() -> Iterator[None]:
    from tests.forked_worker import forked_workers  # noqa: PLC0415 - collecting does without

    with forked_workers():
        yield


@pytest.fixture
def workers_start_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the start of a confined process, and of what such a process has before it."""
    from tests.forked_worker import WorkerProcess, start_in_full  # noqa: PLC0415 - as above

    monkeypatch.setattr(WorkerProcess, "start", staticmethod(start_in_full))


@pytest.fixture(scope="module")
def rates_are_given() -> Iterator[None]:
    """For tests that load models, and to which it does not matter how long their steps take: no rates are measured."""
    from tests.given_rates import given_rates  # noqa: PLC0415 - it imports torch

    with given_rates():
        yield


def pytest_collection() -> None:
    """Collect without garbage collections. Nearly all that is made then stays, so they would find little, and they take
    a fifth of the time.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later garbage collection: thousands of tests, and the libraries."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine or this run cannot do. A test that is skipped takes longer than most that pass.

    Tests of CUDA are skipped where they are asked for, so that a run without a device says so of each.
    """
    asked = config.getoption("markexpr") or ""
    kept, left_out, reasons = list[pytest.Item](), list[pytest.Item](), Counter[str]()
    for item in items:
        if isinstance(item, pytest.Function) and not is_usual(item):
            item.add_marker(pytest.mark.long)
        # Not by keywords: they have the names of folders, too.
        if item.get_closest_marker("cuda") and not has_cuda():
            reason = "no CUDA device"
            if "cuda" in asked:
                item.add_marker(pytest.mark.skip(reason=reason))
                kept.append(item)
                continue
        elif item.get_closest_marker("long") and "long" not in asked:
            reason = "long: run with -m long"
        else:
            kept.append(item)
            continue
        left_out.append(item)
        reasons[reason] += 1
    for item in kept:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = given_up(item.obj, limit_of(item))
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = reasons


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this worker which tests were left out."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a worker told. All workers collect the same tests."""
    if reasons := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = Counter(reasons)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in sorted(terminalreporter.config.stash.get(LEFT_OUT, Counter()).items()):
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")


def limit_of(item: pytest.Item) -> float | None:
    """Seconds; None for no limit."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    return max(limit - MARGIN_S, limit / 2) or None


def given_up(test: Any, limit: float | None) -> Any:
    """`test`, cancelled shortly before pytest-timeout would raise in whatever runs then: the end of its fixtures, which
    waits behind the test on the same loop, would wait for ever, and its worker with it."""

    @functools.wraps(test)
    async def within(*args: Any, **named: Any) -> None:
        with anyio.fail_after(limit):
            await test(*args, **named)

    return within


@functools.cache
def has_cuda() -> bool:
    import torch  # noqa: PLC0415 - most runs of a few pure tests never need it

    return torch.cuda.is_available()
