"""Threads for calls that may never return."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from adapters.daemon_executor import DaemonExecutor

pytestmark = pytest.mark.timeout(60)
HANGS = """
import threading
from adapters.daemon_executor import DaemonExecutor

begun = threading.Event()

def hang():
    begun.set()
    threading.Event().wait()

DaemonExecutor("hang", 1).submit(hang)
begun.wait()
print("the end", flush=True)
"""


def count_threads(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_results_and_errors_come_back() -> None:
    executor = DaemonExecutor("some", 2)
    assert executor.submit(divmod, 7, 2).result(10) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 7, 0).result(10)
    assert [*executor.map(str, range(50))] == [str(number) for number in range(50)]
    executor.shutdown()


def test_threads_are_started_as_they_are_needed_and_end_with_the_executor() -> None:
    executor = DaemonExecutor("needed", 3)
    for _ in range(5):
        executor.submit(int).result(10)
    assert count_threads("needed") <= 2, "a thread that has just ended a call may not wait yet"
    go_on = threading.Event()
    calls = [executor.submit(go_on.wait, 30) for _ in range(6)]
    assert count_threads("needed") == 3
    go_on.set()
    assert all(call.result(10) for call in calls)
    last = executor.submit(str)
    executor.shutdown()
    assert not last.result(10), "what was submitted before still runs"
    with pytest.raises(RuntimeError, match="needed takes no more calls"):
        executor.submit(int)
    end = time.monotonic() + 10
    while count_threads("needed"):
        assert time.monotonic() < end, "threads stay"
        time.sleep(0.002)


def test_a_call_that_was_cancelled_before_it_began_never_runs() -> None:
    executor = DaemonExecutor("cancel", 1)
    go_on = threading.Event()
    first = executor.submit(go_on.wait, 30)
    second = executor.submit(go_on.wait, 30)
    assert second.cancel()
    go_on.set()
    assert first.result(10)
    assert executor.submit(int).result(10) == 0
    executor.shutdown()


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    root = str(Path(__file__).parents[3])
    ended = subprocess.run([sys.executable, "-c", HANGS], cwd=root, capture_output=True, timeout=30, check=True)
    assert ended.stdout == b"the end\n"
