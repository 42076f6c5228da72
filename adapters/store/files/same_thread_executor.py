"""An executor that makes each call at once, on the thread that submits it. Used by the writer of the disk tier.

The writer's thread runs an event loop of its own, on which nothing else waits. So it may block in a system call, and a
second thread would only be woken and waited for. That costs: files of 4 MiB took 1.25 times the processor time per GiB
with a pool of one thread (`benchmarks.write_files`, two cores of an AMD EPYC, 2026-11-28).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SameThreadExecutor(Executor):
    """Runs each call when it is submitted. The futures that it returns are done."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        try:
            result = call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            future.set_exception(error)
        else:
            future.set_result(result)
        return future
