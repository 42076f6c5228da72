"""Log lines about prompts that take long: how far each has got, after a second and then every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attrs import define, field

from effects.ids import RequestId
from effects.stream import ReportProgress
from engine.settings.output.progress import EVERY_S, FIRST_S

log = logging.getLogger("rekindle")


@define
class PrefillLog:
    """Logs the progress of prompts. `log_progress` gets all progress, and `forget` the end of every request."""

    clock: Callable[[], float] = time.monotonic
    # By request: the time of its first progress, and the time from which on the next line is due.
    _started_and_due: dict[RequestId, tuple[float, float]] = field(factory=dict[RequestId, "tuple[float, float]"])

    def log_progress(self, request: RequestId, report: ReportProgress) -> None:
        """Log the progress of a prompt if a line about it is due."""
        now = self.clock()
        since, due = self._started_and_due.setdefault(request, (now, now + FIRST_S))
        if now < due or report.done + 1 >= report.total:  # a decode step feeds the last one
            return
        self._started_and_due[request] = since, now + EVERY_S
        kept = f" ({report.cached:,} of them restored)" if report.cached else ""
        said = f"{report.done:,} of {report.total:,} prompt tokens{kept} after {now - since:.1f} s"
        log.info("request %d: %s", request, said, extra={"request": request})

    def forget(self, request: RequestId) -> None:
        """Forget a request that has ended."""
        self._started_and_due.pop(request, None)
