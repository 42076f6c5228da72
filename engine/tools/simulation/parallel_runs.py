"""Runs independent simulations side by side, in a process each, as far as there are cores for them."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeAlias, TypeVar

from adapters.processors import count_processors

T = TypeVar("T")
# A run. It gets the function to call after each of its steps.
Work: TypeAlias = Callable[[Callable[[], None]], T]


def count_cores() -> int:
    """Return the cores that this process may use; 1 if it cannot fork."""
    return count_processors() if sys.platform == "linux" else 1


def run_side_by_side(runs: Sequence[Work[T]], step: Callable[[], None], most: int) -> list[T]:
    """Run these in processes and return their results in order.

    step: called after each step of any run. most: processes at once.
    """
    if most < 2 or len(runs) < 2:
        return [run(step) for run in runs]
    context = get_context("fork")
    waiting = deque(enumerate(runs))
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
                going[ours] = number, partial(end_process, process)
            for ready in wait(list(going)):
                assert isinstance(ready, Connection), ready
                number, over = going[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    raise RuntimeError("a process that ran a simulation died; see the messages above") from None
                if message is None:
                    step()
                    continue
                (found[number],) = message
                del going[ready]
                ready.close()
                over()
    finally:
        for connection, (_, over) in going.items():
            connection.close()
            over()
    return [found[number] for number in range(len(runs))]


def carry_out(run: Work[T], pipe: Connection) -> None:
    """Run in a child process: sends None for each step, then the result in a tuple."""
    # The parent process gets the signal as well, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send((run(lambda: pipe.send(None)),))


def end_process(process: BaseProcess) -> None:
    process.terminate()
    process.join()
