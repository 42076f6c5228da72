"""Free memory goes back after work, once: when nobody is served, or where somebody is for too long."""

from __future__ import annotations

import logging

import anyio
import anyio.lowlevel
import pytest

from adapters.device.lane.lane import DeviceLane
from effects.all import Launch
from effects.job import Job
from engine.serving.memory_trim import tidied
from tests.engine.play import ScriptedDevice, collect, engine


async def test_it_goes_back_once_after_work_and_not_under_a_request() -> None:
    lane, asked, busy, go = DeviceLane(), list[int](), anyio.Event(), anyio.Event()

    async def before(_: Launch) -> None:
        busy.set()
        await go.wait()

    async with engine(device=ScriptedDevice(before=before)) as running, anyio.create_task_group() as tasks:

        def tidy() -> None:
            asked.append(len(running.runner.world.requests))

        async def work() -> None:
            await collect(running.door.submit(Job(tuple(range(10, 40)), 2)))

        async def tidied_once() -> None:
            while not asked:  # noqa: ASYNC110 - the lane tells nobody
                await anyio.sleep(0.01)

        tasks.start_soon(lambda: tidied(running.runner, lane, every_s=0.01, tidy=tidy))
        await anyio.sleep(0.1)
        assert not asked, "there was no work"
        async with anyio.create_task_group() as worker:
            worker.start_soon(work)
            await busy.wait()
            await anyio.sleep(0.2)
            assert not asked, "somebody is served"
            go.set()
        await tidied_once()
        await anyio.sleep(0.2)
        assert asked == [0]
        await work()
        asked.clear()
        await tidied_once()
        tasks.cancel_scope.cancel()
    lane.close()


async def test_a_server_that_is_never_idle_gives_it_back_too() -> None:
    lane, asked, go = DeviceLane(), list[int](), anyio.Event()

    async def before(_: Launch) -> None:
        await go.wait()

    async with engine(device=ScriptedDevice(before=before)) as running, anyio.create_task_group() as tasks:

        def tidy() -> None:
            asked.append(len(running.runner.world.requests))

        tasks.start_soon(lambda: tidied(running.runner, lane, every_s=0.01, patience_s=0.2, tidy=tidy))
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(collect, running.door.submit(Job(tuple(range(10, 40)), 2)))
        with anyio.fail_after(60):
            while not asked:  # noqa: ASYNC110 - the lane tells nobody
                await anyio.sleep(0.01)
        assert asked == [1]
        go.set()
        tasks.cancel_scope.cancel()
    lane.close()


async def test_what_goes_wrong_is_logged_and_a_closed_lane_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    lane = DeviceLane()

    def tidy() -> None:
        raise OSError("no")

    async with engine() as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: tidied(running.runner, lane, every_s=0.01, tidy=tidy))
        await collect(running.door.submit(Job(tuple(range(10, 40)), 2)))
        with caplog.at_level(logging.ERROR), anyio.fail_after(60):
            while "could not be given back" not in caplog.text:  # noqa: ASYNC110 - the lane tells nobody
                await anyio.sleep(0.01)
        lane.close()
        await collect(running.door.submit(Job(tuple(range(10, 40)), 2)))  # and the group ends by itself
    assert caplog.text.count("could not be given back") >= 1
