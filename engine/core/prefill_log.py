"""The log's word on prompts that take long: how far each has got, after a second and then every few."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attrs import define, field

from effects.ids import RequestId
from effects.stream import ReportProgress
from engine.settings.progress import EVERY_S, FIRST_S

log = logging.getLogger("rekindle")


@define
class PrefillLog:
    """RequestOutcome of every report, and of every end: it knows as many requests as are live."""

    clock: Callable[[], float] = time.monotonic
    _known: dict[RequestId, tuple[float, float]] = field(factory=dict[RequestId, "tuple[float, float]"])  # since, due

    def told(self, request: RequestId, report: ReportProgress) -> None:
        now = self.clock()
        since, due = self._known.setdefault(request, (now, now + FIRST_S))
        if now < due or report.done + 1 >= report.total:  # a decode step feeds the last one
            return
        self._known[request] = since, now + EVERY_S
        kept = f" ({report.cached:,} of them restored)" if report.cached else ""
        said = f"{report.done:,} of {report.total:,} prompt tokens{kept} after {now - since:.1f} s"
        log.info("request %d: %s", request, said, extra={"request": request})

    def ended(self, request: RequestId) -> None:
        self._known.pop(request, None)
