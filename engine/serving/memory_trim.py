"""Gives free memory back to the system when the core says so (`TrimMemory`, `states/pacing.py`).

Tensors of all lengths come and go between allocations that stay, so the C library holds ever more memory that nothing
uses. It was 40 MiB of the 80 MiB by which a server grew in the first minutes of a soak test, and some more with every
new mixture of lengths. oneDNN prepares kernels as well. When they are dropped they leave holes of a quarter of a MiB,
into which the next ones seldom fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from attrs import frozen

from adapters.device.lane.lane import DeviceLane, LaneClosed
from adapters.process_memory import trim_heap
from effects.ids import RequestId
from effects.pacing import TrimMemory

log = logging.getLogger("rekindle")


@frozen(eq=False)
class MemoryTrimmer:
    """Trims memory on the lane, where only the next launch waits for it. trim: does it; takes about 20 ms."""

    lane: DeviceLane
    trim: Callable[[], object] = trim_heap

    def trim_memory(self, _: RequestId, __: TrimMemory) -> None:
        """Queue the trim on the lane. Nothing happens where the lane is closed: the process ends then."""
        with suppress(LaneClosed):
            self.lane.post(self.trim, log_trim_failure)


def log_trim_failure(error: BaseException) -> None:
    log.error("memory could not be given back", exc_info=error)
