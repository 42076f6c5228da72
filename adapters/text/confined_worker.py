"""Starts and asks the process that renders untrusted templates and compiles untrusted grammars.

The process runs `confined_process.py` with little memory and is killed when it takes too long. The event loop only
waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import define, field, frozen

from adapters.text.confined_setup import GrammarSetup, RendererSetup

SCRIPT = Path(__file__).with_name("confined_process.py")
START_SECONDS = 60  # for a fresh interpreter on a busy machine
WALL_CLOCK_FACTOR = 15  # seconds by the clock for each second of processor time, since the machine may be busy
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "TZ", "SYSTEMROOT")


class WorkFailed(Exception):
    """The work was not done. The message lacks its subject, for example "did not end within 30 s"."""


class WorkTimedOut(WorkFailed):
    """The work did not end in time by the clock. It might have ended on a machine that is less busy."""


@frozen
class WorkReply:
    """The answer to one request.

    text: the result, or the error message.
    error: why there is no result. `refused`: the input cannot be used. `failed`: the work broke. Empty: there is one.
    """

    text: str
    error: Literal["", "refused", "failed"] = ""

    @staticmethod
    def from_json(frame: Mapping[str, Any]) -> WorkReply:
        """Read an answer frame of `confined_process.py`."""
        if "error" in frame:
            return WorkReply(frame["message"], frame["error"])
        return WorkReply(frame["ok"])


@define(eq=False)
class ConfinedWorker:
    """Answers one request after the other. The process starts with the first request, and again after a kill.

    setup: makes the set-up frame, to which the limits are added.
    seconds: processor time for each request. The time to compile a template is included.
    max_bytes: address space of the process.
    max_reply_bytes: size of one answer.
    """

    setup: Callable[[], RendererSetup | GrammarSetup]
    seconds: float
    max_bytes: int
    max_reply_bytes: int
    worker: WorkerProcess | None = field(default=None, init=False)
    _lock: anyio.Lock = field(factory=anyio.Lock, init=False)

    async def ask(self, asked: Any) -> WorkReply:
        """Send a request, which must be JSON, and return the answer. Raises WorkFailed where there is no answer."""
        async with self._lock:
            if self.worker is None:
                setup = await anyio.to_thread.run_sync(self._encode_setup)  # a vocabulary takes a while to encode
                self.worker = await WorkerProcess.start()
                reply = await self._exchange(setup, START_SECONDS)
                if reply.error:
                    await self.aclose()
                    return reply
            return await self._exchange(json.dumps(asked).encode(), WALL_CLOCK_FACTOR * self.seconds)

    async def aclose(self) -> None:
        """End the process. The next request starts another one."""
        worker = self.worker
        self.worker = None
        if worker is not None:
            await worker.kill()

    def _encode_setup(self) -> bytes:
        return json.dumps({**self.setup(), "seconds": self.seconds, "max_bytes": self.max_bytes}).encode()

    async def _exchange(self, frame: bytes, seconds: float) -> WorkReply:
        """Send a frame and wait for the answer. Without an answer in time, or when cancelled, kill the process."""
        worker = self.worker
        answered = False
        assert worker is not None
        try:
            with anyio.fail_after(seconds):
                reply = await worker.ask(frame, self.max_reply_bytes)
            answered = True
        except TimeoutError:
            raise WorkTimedOut(f"did not end within {seconds} s") from None
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            # `aclose` may also have ended the process.
            if await worker.wait_for_exit() == -signal.SIGPROF:
                raise WorkFailed(f"took more than {self.seconds} s of processor time") from None
            raise WorkFailed("ended its process") from None
        finally:
            if not answered:
                await self.aclose()
        return reply


@define(eq=False)
class WorkerProcess:
    """The running process and the two pipes to it."""

    process: Process
    replies: BufferedByteReceiveStream

    @staticmethod
    async def start() -> WorkerProcess:
        """Start the process."""
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        process = await anyio.open_process(
            [sys.executable, "-P", str(SCRIPT)],
            env=kept,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server to handle
        )
        assert process.stdout is not None
        return WorkerProcess(process, BufferedByteReceiveStream(process.stdout))

    async def ask(self, frame: bytes, max_reply_bytes: int) -> WorkReply:
        """Send a frame and wait for the answer. Raises WorkFailed for an answer that is too long."""
        assert self.process.stdin is not None
        await self.process.stdin.send(struct.pack(">I", len(frame)) + frame)
        (length,) = struct.unpack(">I", await self.replies.receive_exactly(4))
        if length > max_reply_bytes:
            raise WorkFailed("wrote too much")
        return WorkReply.from_json(json.loads(await self.replies.receive_exactly(length)))

    async def wait_for_exit(self) -> int | None:
        """Wait up to a second for the process to end, and return its exit status. None: it still runs."""
        with anyio.move_on_after(1):
            return await self.process.wait()
        return None

    async def kill(self) -> None:
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()
