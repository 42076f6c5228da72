"""The event loop in which an ingress reads prompts, on a thread of its own.

Ray Serve runs each request in a task without a parent, and anyio would start and stop a worker thread for each of them.
In a loop that `anyio.run` has started, worker threads are kept.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from attrs import define, field

T = TypeVar("T")


@define(eq=False)
class ReadingThread:
    """A running event loop. It ends with `stop`, or with the process."""

    portal: BlockingPortal = field(init=False)

    def __attrs_post_init__(self) -> None:
        started: Future[BlockingPortal] = Future()

        async def serve() -> None:
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await portal.sleep_until_stopped()

        threading.Thread(target=anyio.run, args=(serve,), name="prompt-reader", daemon=True).start()
        self.portal = started.result()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await work on the thread. It is cancelled with the caller, which runs in another event loop."""
        return await asyncio.wrap_future(self.portal.start_task_soon(work))

    def stop(self) -> None:
        """End the event loop. Work that runs there is cancelled."""
        self.portal.call(self.portal.stop, True)
