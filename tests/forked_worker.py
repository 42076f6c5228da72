"""Confined processes for tests, forked from one that has imported what they need.

A confined process takes a tenth of a second of processor time to start, nearly all of it for imports, and hundreds of
tests have one of their own. What is forked runs the same program with the same limits. Tests of the start itself and of
what a process has before that start it in full, with the fixture `workers_start_in_full`.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import UNIXSocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import define, field

from adapters.text import confined_worker
from adapters.text.confined_worker import WorkerProcess

FORKER = Path(__file__).with_name("worker_forker.py")
start_in_full = WorkerProcess.start


@functools.cache
def start_forker() -> socket.socket:
    """Return the socket of the process that forks. There is one, until this process ends. What this process forks may
    use it as well.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {name: os.environ[name] for name in confined_worker.INHERITED if name in os.environ}
    words = [sys.executable, "-P", str(FORKER), str(theirs.fileno()), str(confined_worker.SCRIPT)]
    with theirs:
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=kept, stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


@define(eq=False)
class ForkedProcess:
    """Has what `WorkerProcess` uses of a `Process`. reports: where its exit status comes."""

    pid: int
    stdin: UNIXSocketStream
    reports: UNIXSocketStream
    returncode: int | None = None
    _lock: anyio.Lock = field(factory=anyio.Lock)

    async def wait(self) -> int:
        async with self._lock:
            if self.returncode is None:
                self.returncode = await receive_number(self.reports)
            return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.stdin.aclose()
            await self.wait()
            await self.reports.aclose()


async def receive_number(stream: UNIXSocketStream) -> int:
    return int.from_bytes(await BufferedByteReceiveStream(stream).receive_exactly(8), "little", signed=True)


async def fork_worker() -> WorkerProcess:
    """Stands for `WorkerProcess.start`."""
    (ours, theirs), (reports, report_end) = socket.socketpair(), socket.socketpair()
    with theirs, report_end:
        socket.send_fds(start_forker(), [b"w"], [theirs.fileno(), report_end.fileno()])
    stream, report_stream = await UNIXSocketStream.from_socket(ours), await UNIXSocketStream.from_socket(reports)
    process = ForkedProcess(await receive_number(report_stream), stream, report_stream)
    return WorkerProcess(process, BufferedByteReceiveStream(stream))  # type: ignore[arg-type]


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let confined processes be forked inside the block."""
    WorkerProcess.start = staticmethod(fork_worker)
    try:
        yield
    finally:
        WorkerProcess.start = staticmethod(start_in_full)
