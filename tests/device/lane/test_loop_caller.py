"""Calls from other threads to the event loop: their order, what wakes it, and how they end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from contextvars import ContextVar
from pathlib import Path

import anyio
import pytest

from adapters.device.lane import loop_caller
from adapters.device.lane.loop_caller import make_loop_caller

NAME = ContextVar("NAME", default="outside")


def run_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_functions_are_called_on_the_event_loop_in_the_order_of_the_calls():
    here = threading.get_ident()
    done = anyio.Event()
    found: list[tuple[int, int]] = []
    first, second = make_loop_caller(), make_loop_caller()

    def work():
        for number in range(0, 200, 2):
            first(lambda number: found.append((number, threading.get_ident())), number)
            second(lambda number: found.append((number, threading.get_ident())), number + 1)
        second(done.set)

    run_thread(work)
    with anyio.fail_after(20):
        await done.wait()
    assert found == [(number, here) for number in range(200)]


async def test_a_call_that_comes_from_a_call_wakes_the_event_loop_again():
    call = make_loop_caller()
    done = anyio.Event()
    left = [50]

    def again():
        left[0] -= 1
        call(again if left[0] else done.set)

    run_thread(lambda: call(again))
    with anyio.fail_after(20):
        await done.wait()


async def test_a_call_has_the_context_in_which_its_caller_was_made():
    token = NAME.set("inside")
    call = make_loop_caller()
    NAME.reset(token)
    done = anyio.Event()
    found: list[str] = []

    def look():
        found.append(NAME.get())
        done.set()

    run_thread(lambda: call(look))
    with anyio.fail_after(20):
        await done.wait()
    assert found == ["inside"]
    assert NAME.get() == "outside"


async def test_what_a_function_raises_goes_to_the_handler_of_the_event_loop_and_the_others_are_called():
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(str(context["exception"])))
    call = make_loop_caller()
    done = anyio.Event()

    def fail():
        raise ValueError("lost")

    def work():
        call(fail)
        call(done.set)

    run_thread(work)
    with anyio.fail_after(20):
        await done.wait()
    assert raised == ["lost"]


class CountedWrites:
    """Counts the writes that wake an event loop."""

    def __init__(self, system):
        self.system = system
        self.count = 0

    def write(self, *arguments):
        self.count += 1
        return self.system.write(*arguments)

    def read(self, *arguments):
        return self.system.read(*arguments)


async def test_one_write_that_keeps_the_interpreter_wakes_the_event_loop_for_many_calls(monkeypatch):
    system = loop_caller._system  # noqa: SLF001
    assert isinstance(system, ctypes.PyDLL), "other libraries let go of the interpreter"
    writes = CountedWrites(system)
    monkeypatch.setattr(loop_caller, "_system", writes)
    call = make_loop_caller()
    done = anyio.Event()

    def work():
        for _ in range(100):
            call(lambda: None)
        call(done.set)

    run_thread(work)  # the event loop waits for the thread here, so it takes nothing meanwhile
    with anyio.fail_after(20):
        await done.wait()
    assert writes.count == 1


def list_open_files() -> set[str]:
    """Return the numbers of this process's open files; none where the system does not list them."""
    folder = Path("/proc/self/fd")
    return {one.name for one in folder.iterdir()} if folder.is_dir() else set()


def test_a_closed_event_loop_takes_no_calls_and_its_pipe_is_closed():
    before = list_open_files()

    async def make():
        return make_loop_caller()

    call = asyncio.run(make())
    with pytest.raises(RuntimeError, match="closed"):
        call(lambda: None)
    del call
    gc.collect()
    assert list_open_files() <= before
