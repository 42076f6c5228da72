"""Stops the work for a client that has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Receive


async def run_until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Await the work, and cancel it when the client leaves. The body must have been read.

    The watcher is a plain task of asyncio, which is cancelled and not awaited. A task group of anyio takes twice as
    long, because each end of it formats a description of the running task.
    """
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    watcher = asyncio.create_task(watch())
    try:
        with scope:
            await work()
    finally:
        watcher.cancel()
