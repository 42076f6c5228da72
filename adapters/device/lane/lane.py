"""The device lane: one OS thread that carries out the work of a device, in the order in which it was handed over.

Theory of operation
-------------------

CUDA state and torch's inference mode belong to a thread, and a forward blocks the thread that launches it. So all work
of a device runs on one thread that stays the same, and the event loop never waits for a device. A device has a second
lane if wide forwards of prompts run parallel to decode steps (`prompt_lane.py`).

Work enters a queue from the event loop, in one of two ways:

* `submit`: the caller gets the result, or the exception, on the event loop. `run` is the same as a coroutine.
* `post`: no result. An exception goes to a callback on the lane, before any work that was posted later.

A launch may take many decode steps, and then it occupies the lane for long. Between two steps it calls
`serve_between_steps`, which looks at the queue. Work that was handed over with `between_steps` runs right there, for
instance the opening of another slot. Other work cannot: then the method returns True, and the launch ends.

Invariants:

* The order of the queue is never changed. Work that a launch may not run itself is kept in `_next` and runs next.
* Work that entered is carried out, whatever became of the caller. It is refused with `LaneClosed` if the thread died.
* A closed lane takes no more work, and finishes what it has.

Example: the queue holds [launch A, open slot 2, launch B that does not join]. A takes its first step, opens slot 2
before its second one, then finds B and ends. B is carried out next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

import anyio
import torch
from anyio.lowlevel import current_token
from attrs import define

from adapters.watched_thread import WatchedThread

T = TypeVar("T")
log = logging.getLogger("rekindle.device")


class LaneClosed(RuntimeError):
    """Work was handed to a lane that takes no more."""


@define(eq=False)
class _Submitted(Generic[T]):
    """A piece of work whose result goes to a callback on the event loop.

    wake: callable on any thread; it calls its first argument with the others on the event loop. between_steps: as in
    `_Posted`.
    """

    work: Callable[[], T]
    wake: Callable[..., object]
    on_done: Callable[[T | None, BaseException | None], object]
    between_steps: bool = True

    def carry_out(self) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self.work()
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        self._tell(result, error)

    def refuse(self, error: LaneClosed) -> None:
        self._tell(None, error)

    def _tell(self, result: T | None, error: BaseException | None) -> None:
        try:
            self.wake(self.on_done, result, error)
        except RuntimeError:  # the event loop has closed, and with it every caller
            log.debug("work on the lane outlived its event loop")


@define(eq=False)
class _Posted:
    """A piece of work without a result. on_failed is called on the lane with what it raised.

    between_steps: it may run between two steps of a launch that goes on; otherwise that launch ends for it.
    """

    work: Callable[[], object]
    on_failed: Callable[[BaseException], object]
    between_steps: bool = True

    def carry_out(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - `on_failed` gets it
            self.on_failed(error)

    def refuse(self, error: LaneClosed) -> None:
        self.on_failed(error)


def make_loop_caller() -> Callable[..., object]:
    """Return a function that any thread may call: it has its first argument called with the others on this event loop.

    Called on the event loop. The call happens in a copy of the context of now.
    """
    loop = cast("asyncio.AbstractEventLoop", current_token().native_token)
    return partial(loop.call_soon_threadsafe, context=copy_context())


class DeviceLane:
    """A thread that carries out the work of one device. Work enters on the event loop and is never cancelled.

    The thread runs in torch's inference mode, with `device` as the current one. Code on other threads needs neither.
    others: further devices that its work uses. purpose: what a second lane of the device is for, for the thread's name.
    A second lane of a GPU launches its work on a stream of its own.
    """

    def __init__(
        self, device: torch.device | str = "cpu", others: Sequence[torch.device] = (), *, purpose: str = ""
    ) -> None:
        self.device = torch.device(device)
        self.devices = tuple(dict.fromkeys((*others, self.device)))
        self._purpose = purpose
        self._queue: SimpleQueue[_Submitted[Any] | _Posted | None] = SimpleQueue()
        self._next: list[
            _Submitted[Any] | _Posted | None
        ] = []  # at most one piece: a launch has taken it from the queue
        self._closed = False
        name = f"lane-{self.device}-{purpose}" if purpose else f"lane-{self.device}"
        self.thread = WatchedThread(name, self._work, died=self._refuse_all)
        self.thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], object]) -> None:
        """Carry it out in its turn. `done` is called on the event loop with what it returned or raised."""
        self._put(_Submitted(work, make_loop_caller(), done))

    async def run(self, work: Callable[[], T]) -> T:
        """Carry it out in its turn, and return or raise what it does. A cancelled caller waits for it as well."""
        finished = anyio.Event()
        outcome = list[Any]()

        def finish(result: T | None, error: BaseException | None) -> None:
            outcome.extend((result, error))
            finished.set()

        self.submit(work, finish)
        with anyio.CancelScope(shield=True):
            await finished.wait()
        result, error = outcome
        if error is not None:
            raise error
        return cast("T", result)

    def post(
        self, work: Callable[[], object], failed: Callable[[BaseException], object], *, between_steps: bool = True
    ) -> None:
        """Carry it out in its turn. An exception goes to `failed`, on the lane, before anything posted later.

        between_steps: its turn may come between two steps of a launch that goes on; otherwise that launch ends for it.
        """
        self._put(_Posted(work, failed, between_steps))

    @property
    def has_waiting_work(self) -> bool:
        """Does other work wait for this lane? Asked by any thread."""
        return bool(self._next) or not self._queue.empty()

    def serve_between_steps(self) -> bool:
        """Carry out the waiting work that may run between two steps. Return whether the launch has to end for other
        work.

        Called on the lane, by a launch that goes on.
        """
        while self.has_waiting_work:
            job = self._take()
            if job is None or not job.between_steps:
                self._next.append(job)
                return True
            job.carry_out()
        return False

    def synchronize(self) -> None:
        """Wait until the devices have finished what was launched. Called on the lane."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    @property
    def is_closed(self) -> bool:
        """Does it take no more work?"""
        return self._closed

    def close(self, timeout_s: float = 10) -> bool:
        """Take no more work, finish what is there, end the thread. Return False if it is busy after `timeout_s`."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _put(self, job: _Submitted[Any] | _Posted) -> None:
        if self._closed:
            raise LaneClosed(f"the lane of {self.device} is closed")
        self._queue.put(job)

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            if self._purpose:
                torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            while (job := self._take()) is not None:
                job.carry_out()
                # What the work refers to must not be kept alive while the lane waits.
                del job

    def _take(self) -> _Submitted[Any] | _Posted | None:
        return self._next.pop() if self._next else self._queue.get()

    def _refuse_all(self) -> None:
        """Refuse all work that is left: the thread has died and will never do it."""
        self._closed = True
        with suppress(Empty):
            while True:
                job = self._next.pop() if self._next else self._queue.get_nowait()
                if job is not None:
                    job.refuse(LaneClosed(f"the lane of {self.device} has died"))
