"""Runs that know nothing of each other, side by side: a process each, as far as there are cores for them."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Work: TypeAlias = Callable[[Callable[[], None]], T]  # given what to call after each step


def cores() -> int:
    """That this process may use; 1 where no process can be forked from it."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def beside(runs: Sequence[Work[T]], step: Callable[[], None], most: int) -> list[T]:
    """What they return, in their order. step: called after each step of any of them. most: processes at once.

    They are forked, so that what they read is there already; what they return and nothing else is sent back.
    """
    if most < 2 or len(runs) < 2:
        return [run(step) for run in runs]
    context, waiting = get_context("fork"), deque(enumerate(runs))
    going = dict[Connection, tuple[int, Callable[[], None]]]()
    found = dict[int, T]()
    try:
        while waiting or going:
            while waiting and len(going) < most:
                number, run = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=carry_out, args=(run, theirs), daemon=True)
                process.start()
                theirs.close()
                going[ours] = number, partial(end, process)
            for ready in wait(list(going)):
                assert isinstance(ready, Connection), ready
                number, over = going[ready]
                try:
                    told = ready.recv()
                except EOFError:
                    raise RuntimeError("a process that ran a simulation has died; what is above says why") from None
                if told is None:
                    step()
                    continue
                (found[number],) = told
                del going[ready]
                ready.close()
                over()
    finally:
        for connection, (_, over) in going.items():
            connection.close()
            over()
    return [found[number] for number in range(len(runs))]


def carry_out(run: Work[T], pipe: Connection) -> None:
    """In a process of its own: None for each step, then what came of it, in a tuple."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for it hears that, and ends it
    pipe.send((run(lambda: pipe.send(None)),))


def end(process: BaseProcess) -> None:
    process.terminate()
    process.join()
