"""When an event came, by a client that has many to handle."""

from __future__ import annotations

import asyncio
import socket
import time

import anyio
from anyio.abc import TaskStatus

from engine.tools.bench.load_client import TimestampSelector


def test_what_came_together_came_at_one_time_however_long_each_is_handled() -> None:
    """And what comes later came later."""
    selector, heard = TimestampSelector(), dict[str, list[float]]()
    pairs = {name: socket.socketpair() for name in ("one", "other")}

    async def listen(name: str, mine: socket.socket, *, task_status: TaskStatus[None]) -> None:
        reader, writer = await asyncio.open_connection(sock=mine)
        task_status.started()
        while await reader.read(100):
            heard.setdefault(name, []).append(selector.at)
            time.sleep(0.01)  # noqa: ASYNC251 - the loop does nothing else meanwhile
        writer.close()

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            for name, (mine, _) in pairs.items():
                await tasks.start(listen, name, mine)
            for _ in range(2):
                for _, theirs in pairs.values():
                    theirs.send(b"data")
                await anyio.sleep(0.05)
            for _, theirs in pairs.values():
                theirs.close()

    before = time.perf_counter()
    anyio.run(both, backend_options={"loop_factory": lambda: asyncio.SelectorEventLoop(selector)})
    assert heard["one"] == heard["other"]
    first, second = heard["one"]
    assert before < first < second - 0.01
    assert second < time.perf_counter()
