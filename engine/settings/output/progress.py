"""Shows the progress of a command on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

# The seconds until something is shown, between two lines, and between two updates of a bar.
FIRST_S = 1.0
EVERY_S = 5.0
REFRESH_S = 0.1

QUIET = ContextVar("QUIET", default=False)  # progress is switched off

# Takes the number of steps that were done, and the name of the present step if it has changed.
Advance = Callable[..., None]


@contextmanager
def silence_progress(quiet: bool) -> Iterator[None]:
    """Show no progress inside the block, if `quiet` is set."""
    before = QUIET.set(quiet)
    try:
        yield
    finally:
        QUIET.reset(before)


@contextmanager
def announce_if_slow(activity: str, first_s: float = FIRST_S) -> Iterator[None]:
    """Say what takes long inside the block, when steps cannot be counted: after a second, then every five."""
    done = threading.Event()

    def tell() -> None:
        began = time.monotonic()
        wait = first_s
        while not done.wait(wait):
            wait = EVERY_S
            # The reader has closed the pipe.
            with suppress(OSError, ValueError):
                print(f"{activity} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    if QUIET.get():
        yield
        return
    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


@contextmanager
def count_progress(
    unit: str, total: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Advance]:
    """Show how many steps are done. total: of all steps, if it is known. Nothing is shown within the first second."""
    if QUIET.get():
        yield lambda *_, **__: None
        return
    from rich.console import Console  # noqa: PLC0415 - a server shows none of these
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    task = bar.add_task(unit, total=total)
    done = 0
    due = clock() + FIRST_S
    shown = False

    def advance(steps: int = 1, name: str = unit) -> None:
        nonlocal done, due, shown
        done += steps
        if (now := clock()) < due:
            return
        due = now + (EVERY_S if bar.disable else REFRESH_S)
        if bar.disable:
            print(f"{name}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)
            return
        if not shown:
            bar.start()
            shown = True
        bar.update(task, completed=done, description=name, refresh=True)

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
