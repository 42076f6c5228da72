"""Tests that no thread of ours dies unseen: it is logged and reported, and nothing waits for it any more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from adapters.device.lane.lane import DeviceLane, LaneClosed
from adapters.watched_thread import WatchedThread
from effects.ids import RequestId
from effects.job import Job
from engine.core import trace
from engine.core.event_loop import Envelope
from engine.core.trace import DIGEST_EVERY, Recorder
from engine.serving.serve import wait_for_stop
from engine.settings.user_error import UserError
from states.events import Event, ForRequest, Submitted
from states.settings import Settings
from states.world import advance, make_world
from tests.engine.play import header


class Odd(BaseException):
    """An error that is no `Exception`, as libraries in other languages raise them."""


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("no\nroom"), Odd("no room")])
def test_what_a_thread_dies_of_is_logged_kept_and_told(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    names = list[str]()
    thread = WatchedThread("worker", lambda: fail(error), died=lambda: names.append(threading.current_thread().name))
    thread.start()
    thread.join(10)
    assert (thread.is_dead, thread.trouble, names) == (True, f"{type(error).__name__}: no room", ["worker"])
    assert "the thread worker has died" in caplog.text
    assert "Traceback" in caplog.text, "it is a bug: the log says where"


def test_a_thread_that_may_starts_again_and_the_trouble_stays() -> None:
    runs = list[int]()

    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError(str(len(runs)))

    thread = WatchedThread("worker", work, restarts=2)
    thread.start()
    thread.join(10)
    assert (len(runs), thread.is_dead, thread.trouble) == (3, False, "ValueError: 2")


async def test_nobody_waits_for_a_lane_that_has_died_and_the_server_stops(caplog: pytest.LogCaptureFixture) -> None:
    lane, go = DeviceLane(), threading.Event()
    outcomes = list[str]()

    async def waiting() -> None:
        try:
            await lane.run(lambda: None)
        except LaneClosed as error:
            outcomes.append(str(error))

    async with anyio.create_task_group() as tasks:
        lane.post(go.wait, fail)
        lane.post(lambda: fail(ValueError("first")), fail)  # telling of it fails too
        tasks.start_soon(waiting)
        await anyio.lowlevel.checkpoint()
        go.set()
    assert outcomes == ["the lane of cpu has died"]
    with pytest.raises(LaneClosed):
        lane.post(lambda: None, fail)
    with pytest.raises(UserError, match="the thread lane-cpu died"):
        await wait_for_stop(anyio.Event(), (lane.thread,))


async def test_a_server_hears_of_a_dying_thread_at_once_and_otherwise_stops_when_it_is_told() -> None:
    go = threading.Event()

    def work() -> None:
        go.wait()
        raise ValueError("later")

    dying, healthy = WatchedThread("worker", work), WatchedThread("other", lambda: None)
    dying.start()
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_stop, stop, (dying, healthy))
        await anyio.wait_all_tasks_blocked()
        stop.set()
    threading.Timer(0.1, go.set).start()
    with pytest.raises(UserError, match="the thread worker died"), anyio.fail_after(10):
        await wait_for_stop(anyio.Event(), (dying, healthy))
    dying.join(10)


def fed(recorder: Recorder, count: int) -> None:
    world = make_world(Settings())
    for seq in range(count):
        event = Submitted(Job(prompt=(seq,) * 5, max_tokens=1))
        world, outs = advance(world, ForRequest(RequestId(seq), event))
        recorder.record(Envelope(seq, 0, ForRequest(RequestId(seq), event)), outs, world)


def test_a_trace_writer_that_dies_of_anything_ends_the_trace_and_lets_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "x.jsonl", header(Settings()))
    recorder.start()
    recorder.record(Envelope(0, 0, ForRequest(RequestId(0), cast("Event", object()))), (), make_world(Settings()))
    recorder._thread.join(10)  # noqa: SLF001
    fed(recorder, 1000)
    assert recorder.failure
    assert recorder._backlog.empty(), "nothing queues behind a writer that is gone"  # noqa: SLF001
    assert "ends early" in caplog.text
    recorder.close()


def test_what_waits_for_a_slow_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "BACKLOG", 200)
    go, worlds = threading.Event(), list[Any]()
    recorder = Recorder(tmp_path / "x.jsonl", header(Settings()))
    slow = trace.encode
    monkeypatch.setattr(trace, "encode", lambda record: (go.wait(), slow(record))[1])
    recorder.start()
    try:
        fed(recorder, 1000)
        assert recorder.failure == "the disk is too slow for it"
        worlds += [item[2] for item in recorder._backlog.queue if item is not None]  # noqa: SLF001
        assert len(worlds) in {199, 200}, "the writer may hold one of them"
        assert sum(world is not None for world in worlds) <= 200 // DIGEST_EVERY + 1
    finally:
        go.set()
        recorder.close()
