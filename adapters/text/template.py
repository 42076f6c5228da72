"""Chat templates: from messages to text in which the template's own control tokens are known from typed ones.

A template comes with the checkpoint and is not trusted: it is rendered in a sandbox, in a process of its own
(`render_worker.py`) with little memory, which is killed when it takes too long. The event loop only waits.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import define, field, frozen

from adapters.checkpoint.errors import CheckpointError

WORKER = Path(__file__).with_name("render_worker.py")
START_SECONDS = 60  # a fresh interpreter on a busy machine
PATIENCE = 15  # seconds by the clock for each of processor time: a busy machine is not the template's fault
MAX_OWN_CHARS = 1 << 16  # in a prompt that says one word: a system prompt of its own takes a few thousand
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "TZ", "SYSTEMROOT")

# A rendered conversation: text, and control tokens that the template itself wrote.
Rendered: TypeAlias = "tuple[str | Control, ...]"


@frozen
class Control:
    """A control token: how it is written, its id, and whether it swallows white space beside it."""

    content: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class TemplateRefused(Exception):
    """The template says why it cannot render this conversation: the client's to mend."""


class TemplateFailed(Exception):
    """The template took too long, wrote too much, or broke: the checkpoint's to mend."""


@define(eq=False)
class ChatTemplate:
    """One template and the worker that renders it. The worker starts with the first render and after a kill.

    seconds: of processor time that a render may take.  max_chars: length of what it may write.
    max_bytes: address space of the worker.
    """

    source: str
    controls: Sequence[Control]
    variables: Mapping[str, str] = field(factory=dict)  # bos_token, eos_token ...
    seconds: int = 2
    max_chars: int = 1 << 25
    max_bytes: int = 1 << 30
    _worker: Worker | None = field(default=None, init=False)
    _lock: anyio.Lock = field(factory=anyio.Lock, init=False)
    _nonce: str = field(factory=lambda: str(secrets.randbits(128)), init=False)

    @property
    def wants_argument_text(self) -> bool:
        """Does it handle tool-call arguments as the text they were? Otherwise it is given the parsed object."""
        return bool(re.search(r"arguments\s+is\s+string", self.source))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **variables: Any
    ) -> Rendered:
        """Render a conversation.

        generate: end with the opening of the assistant's answer.
        variables: `tools` and whatever else the template reads.

        Raises TemplateRefused or TemplateFailed.
        """
        asked = {"messages": list(messages), "add_generation_prompt": generate, **variables}
        async with self._lock:
            if self._worker is None:
                await self._start()
            text = await self._ask(json.dumps(asked).encode(), PATIENCE * self.seconds)
        return self._split(text)

    async def check(self) -> None:
        """Render a small conversation. Raises CheckpointError if the template cannot even do that."""
        try:
            rendered = await self.render([{"role": "user", "content": "Hello"}])
        except (TemplateFailed, TemplateRefused) as error:
            raise CheckpointError(f"the chat template does not work: {error}") from error
        if (length := len(text_of(rendered))) > MAX_OWN_CHARS:
            raise CheckpointError(f"the chat template adds {length} characters to a word; accepted: {MAX_OWN_CHARS}")

    async def aclose(self) -> None:
        """End the worker. The next render starts another."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.kill()

    async def _start(self) -> None:
        self._worker = await Worker.start()
        setup = {
            "template": self.source,
            "controls": [control.content for control in self.controls],
            "variables": dict(self.variables),
            "nonce": self._nonce,
            "max_chars": self.max_chars,
            "max_bytes": self.max_bytes,
            "seconds": self.seconds,
        }
        try:
            await self._ask(json.dumps(setup).encode(), START_SECONDS)
        except (TemplateRefused, TemplateFailed):
            await self.aclose()
            raise

    async def _ask(self, frame: bytes, seconds: float) -> str:
        """One question to the worker. It is killed unless it answers in time and the caller stays to hear it."""
        assert self._worker is not None
        answered = False
        try:
            with anyio.fail_after(seconds):
                reply = await self._worker.ask(frame, limit=8 * self.max_chars)
            answered = True
        except TimeoutError:
            raise TemplateFailed(f"the chat template did not end within {seconds} s") from None
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            if await self._worker.ended() == -signal.SIGPROF:
                raise TemplateFailed(f"the chat template took more than {self.seconds} s of processor time") from None
            raise TemplateFailed("the chat template ended its process") from None
        finally:
            if not answered:
                await self.aclose()
        if reply.get("error") == "refused":
            raise TemplateRefused(reply["message"])
        if "error" in reply:
            raise TemplateFailed(reply["message"])
        return str(reply["ok"])

    def _split(self, text: str) -> Rendered:
        """Marks become control tokens."""
        pieces = re.split(f"\ufdd0{self._nonce}\ufdd2([0-9]+)\ufdd1", text)
        rendered = [self.controls[int(piece)] if place % 2 else piece for place, piece in enumerate(pieces)]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateFailed("the chat template wrote a lone surrogate") from None
        return tuple(piece for piece in rendered if piece)


@define(eq=False)
class Worker:
    """The process at the other end of two pipes."""

    process: Process
    replies: BufferedByteReceiveStream

    @staticmethod
    async def start() -> Worker:
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        process = await anyio.open_process(
            [sys.executable, "-P", str(WORKER)],
            env=kept,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server to handle
        )
        assert process.stdout is not None
        return Worker(process, BufferedByteReceiveStream(process.stdout))

    async def ask(self, frame: bytes, limit: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        await self.process.stdin.send(struct.pack(">I", len(frame)) + frame)
        (length,) = struct.unpack(">I", await self.replies.receive_exactly(4))
        if length > limit:
            raise TemplateFailed("the chat template wrote too much")
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


def text_of(rendered: Rendered) -> str:
    """The whole prompt as one string, control tokens written out."""
    return "".join(piece.content if isinstance(piece, Control) else piece for piece in rendered)
