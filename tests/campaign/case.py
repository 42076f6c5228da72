"""Defines what a case of the campaign is, what may not happen in one, and how it is found again.

One oracle serves all kinds. Answers are those of a server without a cache, and rows are those of their tokens. Nothing
takes longer than its deadline. Descriptors, threads and memory are as before. No user sees a traceback, and all damage
that is found is counted. A kind raises where one of these does not hold. Any other exception of a case is a crash.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import TypeAlias

from attrs import define, field, frozen

Case: TypeAlias = Callable[[Random], None]
WARMING = 4  # cases before resources are compared: pools start their threads, libraries their caches
PATIENCE_S = 5.0  # that a thread may take to end
UNCOUNTED = "every damage found is counted"
VERDICTS = ("wrong", "hang", "crash", "traceback", "leak")


class Hang(Exception):
    """Something took longer than its deadline."""


class Shown(Exception):
    """A user was shown a traceback."""


class Leak(Exception):
    """Memory, a descriptor, a thread or a file was not given back."""


@frozen
class Kind:
    """bench: what its cases share, in a folder of its own; its end checks what they left behind.

    share: how many of a thousand cases are of this kind. deadline_s: of one case. together: cases for one bench.
    few: of them in the suite.
    """

    name: str
    bench: Callable[[Path], AbstractContextManager[Case]]
    share: int
    deadline_s: float = 30
    together: int = 250
    few: int = 12


def seed_of(seed: int, kind: str, number: int) -> str:
    """Return the name of a case, from which it is made, and with which it is found again."""
    return f"{seed}:{kind}:{number}"


def verdict(error: BaseException) -> str:
    match error:
        case Hang() | TimeoutError():
            return "hang"
        case Shown():
            return "traceback"
        case Leak():
            return "leak"
        case AssertionError():
            return "wrong"
        case _:
            return "crash"


@define
class Used:
    """The descriptors and threads that this process holds."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Used:
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count())  # noqa: PTH208 - one call, no paths

    def most(self, other: Used) -> Used:
        return Used(max(self.descriptors, other.descriptors), max(self.threads, other.threads))

    def within(self, most: Used) -> bool:
        return self.descriptors <= most.descriptors and self.threads <= most.threads


def resident(process: int | None = None) -> int:
    """MiB of memory that a process has; this one if none is named."""
    lines = Path(f"/proc/{process or os.getpid()}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


@define
class Watchdog:
    """Holds every case of one bench to the part of the oracle that all kinds in this process share."""

    most: Used = field(factory=lambda: Used(0, 0))
    run: int = 0

    def __call__(self, case: Case, random: Random) -> None:
        with no_tracebacks():
            case(random)
        self.run += 1
        if self.run <= WARMING:
            gc.collect()
            self.most = self.most.most(Used.now())
            return
        end = time.monotonic() + PATIENCE_S
        while not (now := Used.now()).within(self.most):
            gc.collect()
            if time.monotonic() > end:
                names = sorted(thread.name for thread in threading.enumerate())
                raise Leak(f"{now} where there were {self.most}: {names}")
            time.sleep(0.01)


@contextmanager
def no_tracebacks() -> Iterator[None]:
    """Assert that our loggers show no traceback, since a user would see it."""
    heard = list[str]()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                heard.append(self.format(record))

    logger, handler = logging.getLogger("rekindle"), Ear()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if heard:
        raise Shown(heard[0])


def quiet(said: str) -> None:
    """`said` was written to a terminal."""
    if shown := re.search("Traceback|panicked", said):
        raise Shown(said[max(0, shown.start() - 1000) : shown.start() + 4000])
