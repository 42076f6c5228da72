"""An executor for calls that may never return, such as those to a folder whose server is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from adapters.watched_thread import WatchedThread

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Runs calls on threads that never hold up the end of the process.

    The interpreter waits for the threads of a `ThreadPoolExecutor` when it ends. A call that hangs would keep it from
    ending. name: of the threads. most: threads at once; they are started as they are needed.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._threads = list[WatchedThread]()
        self._open_calls = 0  # that were submitted and are not over
        self._lock = threading.Lock()
        self._is_shut = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call as soon as a thread is free. Raises RuntimeError after `shutdown`."""
        future = Future[T]()
        self._start(partial(self._run_call, future, partial(call, *args, **kwargs)))
        return future

    def run_soon(self, call: Callable[[Callable[[], None]], None]) -> None:
        """Run a call without a future as soon as a thread is free. Raises RuntimeError after `shutdown`.

        call: raises nothing. It gets a function to call when all that is left to do is to tell that it is over.
        """
        self._start(partial(call, self._count_off))

    def _start(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"{self._name} takes no more calls")
            self._calls.put(call)
            self._open_calls += 1
            if len(self._threads) < min(self._open_calls, self._most):
                self._threads.append(WatchedThread(f"{self._name}_{len(self._threads)}", self._run_calls))
                self._threads[-1].start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Take no more calls. What was submitted still runs, and nothing waits for it, whatever the arguments say."""
        with self._lock:
            self._is_shut = True
            for _ in self._threads:
                self._calls.put(None)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds is free while the thread waits

    def _run_call(self, future: Future[T], call: Callable[[], T]) -> None:
        """Run a call, and put what becomes of it into its future."""
        if not future.set_running_or_notify_cancel():
            self._count_off()
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            self._count_off()
            future.set_exception(error)
        else:
            self._count_off()
            future.set_result(result)

    def _count_off(self) -> None:
        """Note that a call is over, before anybody knows it: the next one needs no other thread."""
        with self._lock:
            self._open_calls -= 1
