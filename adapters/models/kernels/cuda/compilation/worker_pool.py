"""Compiling in other processes: each gets lines of work and answers each with a line. There is one for each
processor, and 16 at most.

The processes end when their input is closed, so also when this process is killed. Those of a `ProcessPoolExecutor`
would wait on, because each of them holds the writing end of the pipe that it reads from.
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

from adapters.processors import count_processors

MOST = 16  # processes, in all pools together
PATIENCE_S = 120.0  # seconds to wait for an answer
LEAVE_S = 5.0  # seconds that a process has to end
_workers = BoundedSemaphore(MOST)


def run_lines(lines: Sequence[str], module: str) -> list[str]:
    """Have every line carried out by processes of `module`, and return what went wrong.

    lines: in the order in which they are begun.

    module: run by processes of this interpreter. It reads a line, does the work, answers with an empty line or the
    reason why it failed, and ends when its input is closed.
    """
    waiting = deque(lines)
    count = min(MOST, count_processors(), len(waiting))
    if not count:
        return []
    with ThreadPoolExecutor(count, "workers") as threads:
        failed = [why for one in threads.map(lambda _: list(_run_worker(waiting, module)), range(count)) for why in one]
    return [*failed, *(f"no process was left for: {line[:80]}" for line in waiting)]


def _run_worker(waiting: deque[str], module: str) -> Iterator[str]:
    """Work on lines in a process of its own while there are any and the process lives. Yields why a line failed."""
    with _workers:
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
            while (line := _take_line(waiting)) is not None:
                answer = _ask(process, line)
                if not answer.endswith("\n"):
                    yield f"its process ended: {line[:80]}"
                    return
                if why := answer.strip():
                    yield why
        finally:
            _end_process(process)


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """Return the answer to a line. It lacks its newline if the process has ended, or was killed for taking too long."""
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


def _end_process(process: subprocess.Popen[str]) -> None:
    """Close the input, so that the process ends, or kill it with all processes that it has started."""
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


def _take_line(waiting: deque[str]) -> str | None:
    try:
        return waiting.popleft()
    except IndexError:  # another thread has taken the last
        return None
