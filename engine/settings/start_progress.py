"""What a start is doing, on stderr: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import gc
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field

from adapters.watched_thread import Watched
from engine.settings.progress import EVERY_S

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("rekindle")
IMPORT = "importing torch"
COMPILE = "compiling kernels"
PROBE = "probing numerics"
WEIGHTS = "reading weights"
WARM_UP = "warming up"
DRAFT = "reading the draft"
MEASURE = "measuring how long decode steps take"
CACHE = "opening the cache"
TOKENIZER = "reading the tokenizer"
STEPS = (IMPORT, TOKENIZER, COMPILE, PROBE, WEIGHTS, DRAFT, WARM_UP, MEASURE, CACHE)
TIMED = {PROBE, MEASURE}  # nothing else goes on meanwhile


class StepHeard(Protocol):
    """RequestOutcome of a step as it begins, and of how much of it is done."""

    def __call__(self, step: str, done: int = 0, total: int = 0, /) -> None: ...


@contextmanager
def importing() -> Iterator[None]:
    """What is imported stays, so the collector need not look through it: it would again and again, and once more when
    all is ready. An import can swallow a KeyboardInterrupt. And torch asks which module a frame is of, which `inspect`
    finds by looking where the files of all modules are: 0.04 s, more where files are far.
    """
    interrupt, ask = signal.signal(signal.SIGINT, signal.SIG_DFL), inspect.getmodule
    gc.disable()
    inspect.getmodule = partial(module_of, ask)
    try:
        yield
    finally:
        inspect.getmodule = ask
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGINT, interrupt)


def module_of(ask: Callable[..., ModuleType | None], one: object, *file: Any, **named: Any) -> ModuleType | None:
    """A frame says of which module it is. ask: of anything else."""
    if inspect.isframe(one):
        return sys.modules.get(one.f_globals.get("__name__", ""))
    return ask(one, *file, **named)


@define
class Steps:
    """Call it with each step as it begins, from any thread, and again with how much of it is done, if that is known;
    leave the block when all is done, or nothing will be.

    lines: a line for each on a terminal, too. every_s: between lines that say that a step still goes on.
    """

    lines: bool = False
    every_s: float = EVERY_S
    began: float = field(factory=time.monotonic)
    _bar: Progress | None = None
    _task: Any = None
    _now: str = ""  # the step, and how far it has got
    _over: threading.Event = field(factory=threading.Event)

    def __enter__(self) -> Steps:
        if not log.isEnabledFor(logging.INFO):
            return self
        if sys.stderr.isatty() and not self.lines:
            self._show_bar()
        else:
            Watched("starting", self._still).start()
        return self

    def _show_bar(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - a service shows none
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("starting", total=len(STEPS))
        self._bar.start()
        console.show_cursor()  # a signal may end us before the bar could show it again

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """done: of so many parts of it in all."""
        before, self._now = self._now, f"{step}, {done:,} of {total:,}" if total else step
        if self._bar is not None:
            part = done / total if total else 0
            self._bar.update(self._task, description=self._now, completed=STEPS.index(step) + part)
        elif not total and self._now != before:
            log.info("starting: %s (%.1f s)", step, time.monotonic() - self.began)

    def _still(self) -> None:
        while not self._over.wait(self.every_s):
            if self._now:
                log.info("starting: still %s (%.1f s)", self._now, time.monotonic() - self.began)

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def parts(step: StepHeard, name: str, total: int) -> Callable[[], None]:
    """To be called after each part of a step; every hundredth of all is told."""
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        if 100 * done // total > 100 * (done - 1) // total and done <= total:
            step(name, done, total)

    return one_more


def silent(_: str, __: int = 0, ___: int = 0) -> None:
    """Of whoever loads a model without telling anybody."""
