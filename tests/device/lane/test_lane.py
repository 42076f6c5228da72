"""The device lane: one thread, in order, never cancelled, nothing lost."""

from __future__ import annotations

import threading
import weakref

import anyio
import pytest
import torch

from adapters.device.lane.lane import DeviceLane, LaneClosed


@pytest.fixture
def lane():
    lane = DeviceLane()
    yield lane
    assert lane.close()


async def test_work_runs_on_one_thread_in_inference_mode_and_its_result_comes_back(lane):
    here = threading.get_ident()
    first, inference = await lane.run(lambda: (threading.get_ident(), torch.is_inference_mode_enabled()))
    second = await lane.run(threading.get_ident)
    assert first == second != here
    assert inference
    assert not torch.is_inference_mode_enabled()


async def test_an_exception_is_raised_where_the_work_is_awaited_and_the_lane_goes_on(lane):
    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await lane.run(fail)
    assert await lane.run(lambda: 7) == 7


async def test_work_is_done_in_the_order_in_which_it_was_handed_over(lane):
    done: list[int] = []
    async with anyio.create_task_group() as tasks:
        for number in range(0, 100, 2):
            tasks.start_soon(lane.run, lambda number=number: done.append(number))
            await anyio.lowlevel.checkpoint()
            lane.post(lambda number=number: done.append(number + 1), pytest.fail)
    await lane.run(lambda: None)
    assert done == list(range(100))


async def test_the_failure_of_posted_work_is_told_before_anything_later_runs(lane):
    reported: list[str] = []

    def fail():
        raise ValueError("no room")

    lane.post(fail, lambda error: reported.append(str(error)))
    assert await lane.run(lambda: list(reported)) == ["no room"]


async def test_submitted_work_tells_on_the_event_loop_what_it_returned_or_raised(lane):
    reported, all_reported = [], anyio.Event()

    def done(result, error):
        reported.append((result, type(error), threading.get_ident()))
        if len(reported) == 2:
            all_reported.set()

    lane.submit(lambda: 3, done)
    lane.submit(lambda: {}["nothing"], done)
    assert reported == []
    with anyio.fail_after(60):
        await all_reported.wait()
    assert reported == [(3, type(None), threading.get_ident()), (None, KeyError, threading.get_ident())]


async def test_a_cancelled_caller_waits_for_the_work_that_has_begun(lane):
    begun, go_on, finished = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        go_on.wait(60)
        finished.append(True)
        return "result"

    results = []

    async def caller():
        results.append(await lane.run(work))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(caller)
        while not begun.is_set():  # noqa: ASYNC110 - the flag is set by a thread
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
        early = finished.copy()
        go_on.set()
    assert early == []
    assert finished == [True]
    assert results == ["result"]


async def test_the_event_loop_keeps_turning_while_the_lane_works(lane):
    go_on, turns = threading.Event(), 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lane.run, lambda: go_on.wait(60))
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
            turns += 1
        go_on.set()
    assert turns == 50


async def test_a_closed_lane_finishes_what_is_in_and_takes_no_more():
    lane, done = DeviceLane(), []
    lane.post(lambda: done.append(1), pytest.fail)
    assert lane.close()
    assert lane.close()
    assert done == [1]
    with pytest.raises(LaneClosed):
        lane.post(lambda: None, pytest.fail)
    with pytest.raises(LaneClosed):
        await lane.run(lambda: None)
    with pytest.raises(LaneClosed):
        lane.submit(lambda: None, pytest.fail)


async def test_closing_a_busy_lane_gives_up_after_its_bound():
    lane, go_on = DeviceLane(), threading.Event()
    lane.post(lambda: go_on.wait(60), pytest.fail)
    assert not lane.close(0.05)
    go_on.set()
    assert lane.close()


async def test_the_lane_keeps_nothing_of_finished_work_alive(lane):
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)

    def work(held=big):
        return held is not None

    assert await lane.run(work)
    del big, work
    with anyio.fail_after(60):
        while gone() is not None:  # noqa: ASYNC110 - the lane forgets it a moment after its report
            await anyio.sleep(0.001)


def test_work_that_outlives_its_event_loop_does_not_end_the_lane():
    lane, begun, go_on = DeviceLane(), threading.Event(), threading.Event()

    async def leave():
        loop = anyio.lowlevel.current_token().native_token
        task = loop.create_task(lane.run(lambda: (begun.set(), go_on.wait(60))))
        while not begun.is_set():  # noqa: ASYNC110
            await anyio.sleep(0.001)
        task.cancel()

    anyio.run(leave)
    go_on.set()
    assert anyio.run(lane.run, lambda: 5) == 5
    assert lane.close()
