"""Free memory goes back to the system, when nobody is served or, where somebody always is, all the same.

Tensors of all lengths come and go between allocations that stay, so that the C library holds ever more memory that
nobody uses: 40 MiB of a soak's 80 MiB of growth in its first minutes, and some more with every new mixture of lengths.
What oneDNN has prepared leaves holes of a quarter of a MiB where it is let go, and the next seldom fits into them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from adapters.device.lane.lane import DeviceLane, LaneClosed
from adapters.process_memory import trim_heap
from engine.core.event_loop import EventLoop

log = logging.getLogger("rekindle")
EVERY_S = 60  # at most: trimming takes 20 ms, and what is wanted again is mapped anew page by page, 15 MiB or so
IDLE_S = 0.1  # how often it is looked for a moment without requests
PATIENCE_S = 15  # then everybody waits those 20 ms: 0.03 % of the time, and a server that is never idle stays as small


async def tidied(
    runner: EventLoop,
    lane: DeviceLane,
    *,
    every_s: float = EVERY_S,
    patience_s: float = PATIENCE_S,
    tidy: Callable[[], object] = trim_heap,
) -> None:
    """For ever: on the lane, where the next request waits for it and best nobody else does; never without work before.

    patience_s: how long a moment without requests is waited for.
    """
    seen = runner.seq
    while True:
        await anyio.sleep(every_s)
        if runner.seq == seen:
            continue
        with anyio.move_on_after(patience_s):
            while runner.world.requests:  # noqa: ASYNC110 - an event would cost every request
                await anyio.sleep(IDLE_S)
        seen = runner.seq
        try:
            lane.post(tidy, failed)
        except LaneClosed:
            return


def failed(error: BaseException) -> None:
    log.error("unused memory could not be returned to the system", exc_info=error)
