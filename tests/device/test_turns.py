"""Slices of the scheduler's: a thread asks for its own, and whoever it starts has the same."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapters.device.lane import DeviceLane
from adapters.turns import HEARD_NS, WORK_NS, Attributes, take_slices

GETATTR = {"x86_64": 315, "aarch64": 275}


def attributes() -> Attributes:
    """Of the calling thread, as the kernel has them."""
    found = Attributes()
    number = ctypes.c_long(GETATTR[platform.machine()])
    assert not ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return found


@pytest.fixture
def planned_by_slices() -> None:
    """Only a kernel that knows of them can say that it was asked."""
    if platform.system() != "Linux" or platform.machine() not in GETATTR:
        pytest.skip("this system has none")
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release < (6, 12):
        pytest.skip("a kernel before 6.12 passes over them")
    with ThreadPoolExecutor(1) as other:
        if not other.submit(take_slices, WORK_NS).result():
            pytest.skip("threads may not ask here")


@pytest.mark.usefixtures("planned_by_slices")
def test_a_thread_takes_its_own_and_gives_them_to_those_that_it_starts() -> None:
    before, found = attributes().runtime, list[int]()

    def inner() -> None:
        found.append(attributes().runtime)

    def outer() -> None:
        assert take_slices(HEARD_NS)
        inner()
        started = threading.Thread(target=inner)
        started.start()
        started.join()

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    assert found == [HEARD_NS, HEARD_NS]
    assert attributes().runtime == before


@pytest.mark.usefixtures("planned_by_slices")
def test_what_else_a_thread_was_given_stays() -> None:
    def nicer() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        assert take_slices(HEARD_NS)
        found = attributes()
        return found.nice, found.policy

    with ThreadPoolExecutor(1) as other:
        assert other.submit(nicer).result() == (7, os.sched_getscheduler(0))


@pytest.mark.usefixtures("planned_by_slices")
def test_a_lane_that_computes_itself_gives_way_to_whoever_wakes() -> None:
    found, told, lane = list[int](), threading.Event(), DeviceLane("cpu")

    def look() -> None:
        found.append(attributes().runtime)
        told.set()

    lane.post(look, lambda _: told.set())
    assert told.wait(10)
    assert lane.close()
    assert found == [WORK_NS]


def test_a_system_without_them_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not take_slices(HEARD_NS)
