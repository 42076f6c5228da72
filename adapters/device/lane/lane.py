"""The device lane: an OS thread that carries a device's work out in the order it was handed over.

A device has one, and one more where some of its work goes beside the rest (`beside.py`).
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
    """A piece of work, and who hears on the event loop what came of it. between: as `_Posted` has it."""

    work: Callable[[], T]
    wake: Callable[..., object]  # from any thread: calls its first argument with the rest, on the event loop
    done: Callable[[T | None, BaseException | None], object]
    between: bool = True

    def carry_out(self) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self.work()
        except BaseException as raised:  # noqa: BLE001 - whoever submitted it is told
            error = raised
        self._tell(result, error)

    def refuse(self, error: LaneClosed) -> None:
        self._tell(None, error)

    def _tell(self, result: T | None, error: BaseException | None) -> None:
        try:
            self.wake(self.done, result, error)
        except RuntimeError:  # the event loop has closed, so nobody waits any more
            log.debug("work on the lane outlived its event loop")


@define(eq=False)
class _Posted:
    """A piece of work that nobody awaits, and who hears when it fails.

    between: it has its turn between two steps of a launch that goes on; otherwise it waits for that one's end.
    """

    work: Callable[[], object]
    failed: Callable[[BaseException], object]
    between: bool = True

    def carry_out(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - whoever posted it is told
            self.failed(error)

    def refuse(self, error: LaneClosed) -> None:
        self.failed(error)


def waker() -> Callable[..., object]:
    """On an event loop: what any thread calls its first argument with there, with the rest of them, in the context of
    who asks for it now.
    """
    loop = cast("asyncio.AbstractEventLoop", current_token().native_token)
    return partial(loop.call_soon_threadsafe, context=copy_context())


class DeviceLane:
    """Work enters from the event loop's thread, in order, and is never cancelled once it is in.

    The thread runs in torch's inference mode, with `device` current. Outside it no torch call needs either. others: on
    which the work is carried out, too. beside: what it is for, where the device has another lane; a GPU is told on a
    stream of its own then.
    """

    def __init__(
        self, device: torch.device | str = "cpu", others: Sequence[torch.device] = (), *, beside: str = ""
    ) -> None:
        self.device = torch.device(device)
        self.devices = tuple(dict.fromkeys((*others, self.device)))
        self._beside = beside
        self._queue: SimpleQueue[_Submitted[Any] | _Posted | None] = SimpleQueue()
        self._next: list[_Submitted[Any] | _Posted | None] = []  # at most one, that a launch has looked at
        self._closed = False
        name = f"lane-{self.device}-{beside}" if beside else f"lane-{self.device}"
        self.thread = WatchedThread(name, self._work, died=self._refuse_all)
        self.thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], object]) -> None:
        """Do it in its turn; `done` hears on the event loop what it returned or raised. One wake-up, no task."""
        self._put(_Submitted(work, waker(), done))

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, on the lane's thread. A cancelled caller waits for it all the same."""
        finished, outcome = anyio.Event(), list[Any]()

        def done(result: T | None, error: BaseException | None) -> None:
            outcome.extend((result, error))
            finished.set()

        self.submit(work, done)
        with anyio.CancelScope(shield=True):
            await finished.wait()
        result, error = outcome
        if error is not None:
            raise error
        return cast("T", result)

    def post(
        self, work: Callable[[], object], failed: Callable[[BaseException], object], *, between: bool = True
    ) -> None:
        """Do it in its turn; nobody waits. An exception goes to `failed`, on the lane, before anything posted later.
        between: its turn may come between two steps of a launch that goes on. Otherwise that ends for it.
        """
        self._put(_Posted(work, failed, between))

    @property
    def wanted(self) -> bool:
        """By any thread: does other work wait for it?"""
        return bool(self._next) or not self._queue.empty()

    def interrupted(self) -> bool:
        """On the lane, between two steps of a launch: carry out what need not wait for its end. Does anything else?"""
        while self.wanted:
            job = self._take()
            if job is None or not job.between:
                self._next.append(job)
                return True
            job.carry_out()
        return False

    def synchronize(self) -> None:
        """On the lane: wait until the devices have done what they were told to."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, timeout_s: float = 10) -> bool:
        """Take no more, finish what is in, end the thread. False if it was still busy after `timeout_s`."""
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
            if self._beside:
                torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            while (job := self._take()) is not None:
                job.carry_out()
                del job  # what it refers to is not kept alive while the lane waits

    def _take(self) -> _Submitted[Any] | _Posted | None:
        return self._next.pop() if self._next else self._queue.get()

    def _refuse_all(self) -> None:
        """The thread has died: nobody waits for what it will never do."""
        self._closed = True
        with suppress(Empty):
            while True:
                job = self._next.pop() if self._next else self._queue.get_nowait()
                if job is not None:
                    job.refuse(LaneClosed(f"the lane of {self.device} has died"))
