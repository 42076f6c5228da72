"""Shows on stderr what a start is doing: a bar on a terminal, a line for each step elsewhere."""

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

from adapters.watched_thread import WatchedThread
from engine.settings.output.progress import EVERY_S

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
TIMED = {PROBE, MEASURE}  # nothing else runs during these steps


class StepListener(Protocol):
    """Called with a step when it begins, and with how much of it is done."""

    def __call__(self, step: str, done: int = 0, total: int = 0, /) -> None: ...


@contextmanager
def speed_up_imports() -> Iterator[None]:
    """Make imports inside the block faster. Ctrl-C ends the process at once meanwhile, without a traceback.

    The garbage collector pauses: what is imported stays, so there is nothing to collect. `inspect.getmodule` finds the
    module of a frame without a search (`find_module`).
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    ask = inspect.getmodule
    gc.disable()
    inspect.getmodule = partial(find_module, ask)
    try:
        yield
    finally:
        inspect.getmodule = ask
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGINT, interrupt)


def find_module(ask: Callable[..., ModuleType | None], value: object, *file: Any, **named: Any) -> ModuleType | None:
    """Return the module of a frame, for `inspect.getmodule`, which searches for it slowly. ask: for other objects."""
    if inspect.isframe(value):
        return sys.modules.get(value.f_globals.get("__name__", ""))
    return ask(value, *file, **named)


@define
class StartProgress:
    """Shows the steps of a start. Call it with each step when it begins, from any thread, and again with how much of it
    is done, if that is known.
    """

    lines: bool = False
    every_s: float = EVERY_S
    began: float = field(factory=time.monotonic)
    _bar: Progress | None = None
    _task: Any = None
    _now: str = ""  # the step, and its progress
    _over: threading.Event = field(factory=threading.Event)

    def __enter__(self) -> StartProgress:
        if not log.isEnabledFor(logging.INFO):
            return self
        if sys.stderr.isatty() and not self.lines:
            self._show_bar()
        else:
            WatchedThread("starting", self._log_running_step).start()
        return self

    def _show_bar(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - a service shows none
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("starting", total=len(STEPS))
        self._bar.start()
        # A signal may end the process before the bar could show it again.
        console.show_cursor()

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """Show a step, which is one of `STEPS`. done: how many of its `total` parts are done.

        Where there is no bar, a line is logged when a step begins. Its parts show only in the lines that say what is
        still going on.
        """
        before = self._now
        self._now = f"{step}, {done:,} of {total:,}" if total else step
        if self._bar is not None:
            part = done / total if total else 0
            self._bar.update(self._task, description=self._now, completed=STEPS.index(step) + part)
        elif not total and self._now != before:
            log.info("starting: %s (%.1f s)", step, time.monotonic() - self.began)

    def _log_running_step(self) -> None:
        while not self._over.wait(self.every_s):
            if self._now:
                log.info("starting: still %s (%.1f s)", self._now, time.monotonic() - self.began)

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def make_weight_counter(on_step: StepListener, total: int) -> Callable[[], None]:
    """Return a function to call when a tensor was loaded, of `total` tensors. It reports every hundredth of them."""
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        if 100 * done // total > 100 * (done - 1) // total and done <= total:
            on_step(WEIGHTS, done, total)

    return one_more


def ignore_step(_: str, __: int = 0, ___: int = 0) -> None:
    """Take a step and do nothing, for loads without progress."""
