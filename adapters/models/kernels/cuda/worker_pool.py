"""Work that other processes do, a line of it for a line of answer, as many at once as there are processors.

They end when nobody writes to them any more, so also when this process is killed: those of a `ProcessPoolExecutor` go
on waiting then, since each of them holds the end of the pipe that it reads from.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, Timer

MOST = 16  # processes, whoever has them
PATIENCE_S = 120.0  # for an answer
LEAVE_S = 5.0  # to end in
_places = BoundedSemaphore(MOST)


def all_done(lines: Sequence[str], module: str) -> list[str]:
    """What went wrong. lines: in the order in which they are begun. module: is run by processes of this interpreter;
    reads a line, does what it says, writes an empty one or why it was not done, and ends when nobody writes to it.
    """
    waiting = deque(lines)
    count = min(MOST, os.cpu_count() or 1, len(waiting))
    if not count:
        return []
    with ThreadPoolExecutor(count, "workers") as threads:
        failed = [why for one in threads.map(lambda _: list(_done(waiting, module)), range(count)) for why in one]
    return [*failed, *(f"nobody was left for: {line[:80]}" for line in waiting)]


def _done(waiting: deque[str], module: str) -> Iterator[str]:
    """By a process of its own, while there is anything to do and it has not ended. Why something was not done."""
    with _places:
        if not waiting:
            return
        try:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
                [sys.executable, "-P", "-m", module],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(one or str(Path.cwd()) for one in sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the server to handle
            )
        except OSError as error:
            yield str(error)
            return
        try:
            while (line := _next(waiting)) is not None:
                answer = _answer(process, line)
                if not answer.endswith("\n"):
                    yield f"its process ended: {line[:80]}"
                    return
                if why := answer.strip():
                    yield why
        finally:
            _end(process)


def _answer(process: subprocess.Popen[str], line: str) -> str:
    """Not a line, if the process has ended, or been ended for taking too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = Timer(PATIENCE_S, partial(_kill, process))
    late.start()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except OSError:
        return ""
    finally:
        late.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    """Nobody writes to it any more, so it ends, or is ended with all that it has started."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
    process.stdout.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # of the session that it has begun


def _next(waiting: deque[str]) -> str | None:
    try:
        return waiting.popleft()
    except IndexError:  # another thread has taken the last
        return None
