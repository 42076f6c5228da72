"""What a start is doing, on stderr: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define, field
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger("rekindle")
IMPORT = "importing torch"
PROBE = "probing numerics"
WEIGHTS = "reading weights"
WARM_UP = "warming up"
DRAFT = "reading the draft"
MEASURE = "measuring how long decode steps take"
CACHE = "opening the cache"
TOKENIZER = "reading the tokenizer"
STEPS = (IMPORT, TOKENIZER, PROBE, WEIGHTS, DRAFT, WARM_UP, MEASURE, CACHE)
TIMED = {PROBE, MEASURE}  # nothing else goes on meanwhile


@contextmanager
def importing() -> Iterator[None]:
    """What is imported stays, so the collector need not look through it: it would again and again, and once more when
    all is ready. An import can swallow a KeyboardInterrupt."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGINT, interrupt)


@define
class Steps:
    """Call it with each step as it begins, from any thread; leave the block when all is done, or nothing will be.

    lines: a line for each on a terminal, too.
    """

    lines: bool = False
    began: float = field(factory=time.monotonic)
    _bar: Progress | None = None
    _task: Any = None

    def __enter__(self) -> Steps:
        console = Console(stderr=True)
        if console.is_terminal and not self.lines:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("starting", total=len(STEPS))
            self._bar.start()
            console.show_cursor()  # a signal may end us before the bar could show it again
        return self

    def __call__(self, step: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=step, completed=STEPS.index(step))
        else:
            log.info("starting: %s (%.1f s)", step, time.monotonic() - self.began)

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def silent(_: str) -> None:
    """Of whoever loads a model without telling anybody."""
