"""A process of its own for work that strangers thought up (`confined.py`), killed when it takes too long.

The event loop only waits.
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
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import define, field

SCRIPT = Path(__file__).with_name("confined_process.py")
START_SECONDS = 60  # a fresh interpreter on a busy machine
PATIENCE = 15  # seconds by the clock for each of processor time: a busy machine is not the work's fault
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "TZ", "SYSTEMROOT")


class WorkFailed(Exception):
    """It was not done. The message lacks its subject: "did not end within 30 s"."""


class WorkLate(WorkFailed):
    """It might have been done on a machine that is less busy."""


@define(eq=False)
class Confined:
    """Answers one question after the other. The process starts with the first of them and after a kill.

    setup: what it is told first, beside these limits.  seconds: of processor time for each, a template's compilation
    included.  max_bytes: its address space.  most: bytes of an answer.
    """

    setup: Callable[[], Mapping[str, Any]]
    seconds: float
    max_bytes: int
    most: int
    worker: Worker | None = field(default=None, init=False)
    _lock: anyio.Lock = field(factory=anyio.Lock, init=False)

    async def ask(self, asked: Any) -> dict[str, Any]:
        """`{"ok": ...}` or `{"error": kind, "message": text}`. Raises WorkFailed where it gave no answer."""
        async with self._lock:
            if self.worker is None:
                told = await anyio.to_thread.run_sync(self._told)  # a vocabulary takes a while to write out
                self.worker = await Worker.start()
                reply = await self._ask(told, START_SECONDS)
                if "error" in reply:
                    await self.aclose()
                    return reply
            return await self._ask(json.dumps(asked).encode(), PATIENCE * self.seconds)

    async def aclose(self) -> None:
        """End the process. The next question starts another."""
        if self.worker is not None:
            worker, self.worker = self.worker, None
            await worker.kill()

    def _told(self) -> bytes:
        return json.dumps({**self.setup(), "seconds": self.seconds, "max_bytes": self.max_bytes}).encode()

    async def _ask(self, frame: bytes, seconds: float) -> dict[str, Any]:
        """It is killed unless it answers in time and the caller stays to hear it."""
        worker, answered = self.worker, False
        assert worker is not None
        try:
            with anyio.fail_after(seconds):
                reply = await worker.ask(frame, self.most)
            answered = True
        except TimeoutError:
            raise WorkLate(f"did not end within {seconds} s") from None
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            if await worker.ended() == -signal.SIGPROF:  # `aclose` may have ended it, too
                raise WorkFailed(f"took more than {self.seconds} s of processor time") from None
            raise WorkFailed("ended its process") from None
        finally:
            if not answered:
                await self.aclose()
        return reply


@define(eq=False)
class Worker:
    """The process at the other end of two pipes."""

    process: Process
    replies: BufferedByteReceiveStream

    @staticmethod
    async def start() -> Worker:
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        process = await anyio.open_process(
            [sys.executable, "-P", str(SCRIPT)],
            env=kept,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server to handle
        )
        assert process.stdout is not None
        return Worker(process, BufferedByteReceiveStream(process.stdout))

    async def ask(self, frame: bytes, most: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        await self.process.stdin.send(struct.pack(">I", len(frame)) + frame)
        (length,) = struct.unpack(">I", await self.replies.receive_exactly(4))
        if length > most:
            raise WorkFailed("wrote too much")
        reply: dict[str, Any] = json.loads(await self.replies.receive_exactly(length))
        return reply

    async def ended(self) -> int | None:
        """How, if it has."""
        with anyio.move_on_after(1):
            return await self.process.wait()
        return None

    async def kill(self) -> None:
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()
