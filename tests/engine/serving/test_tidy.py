"""Free memory goes back on the lane when the core says so."""

from __future__ import annotations

import logging
import threading

import pytest

from adapters.device.lane.lane import DeviceLane
from effects.ids import ENGINE
from effects.pacing import TrimMemory
from engine.serving.memory_trim import MemoryTrimmer


def test_it_goes_back_on_the_lane_behind_what_is_there() -> None:
    lane, go, done, order = DeviceLane(), threading.Event(), threading.Event(), list[str]()
    lane.post(lambda: (go.wait(), order.append("a launch")), print)

    def trim() -> None:
        order.append(threading.current_thread().name)
        done.set()

    MemoryTrimmer(lane, trim).trim_memory(ENGINE, TrimMemory())
    assert order == []
    go.set()
    assert done.wait(20)
    assert order[0] == "a launch"
    assert order[1] != threading.current_thread().name
    lane.close()


def test_what_goes_wrong_is_logged_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lane, done = DeviceLane(), threading.Event()

    def fail() -> None:
        raise OSError("no")

    with caplog.at_level(logging.ERROR):
        MemoryTrimmer(lane, fail).trim_memory(ENGINE, TrimMemory())
        lane.post(done.set, print)
        assert done.wait(20)
    assert caplog.text.count("could not be returned to the system") == 1
    lane.close()


def test_a_lane_that_is_closed_trims_no_more() -> None:
    lane, trims = DeviceLane(), list[int]()
    lane.close()
    MemoryTrimmer(lane, lambda: trims.append(1)).trim_memory(ENGINE, TrimMemory())
    assert trims == []
