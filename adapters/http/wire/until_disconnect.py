"""Stops the work for a client that has left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Receive


async def run_until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Await the work, and cancel it when the client leaves. The body must have been read.

    Exceptions of the work are raised in a group.
    """
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        await work()
        tasks.cancel_scope.cancel()
