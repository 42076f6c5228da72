"""One connection between a server and a shard's daemon: frames in and out, each by its deadline.

Whatever goes wrong on it, a frame that is none, one that comes late, an end that is gone, ends it for good: nothing is
sent or read any more, so nothing that came too late is ever taken for the answer to something else.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.remote.protocol import frames
from adapters.remote.protocol.frames import FAILED, HEAD, REPLY, SHARED, FrameHead, Malformed
from adapters.remote.protocol.lent_memory import Borrower, Lender
from adapters.remote.protocol.messages import Failure, Unacceptable, decode_message
from adapters.remote.protocol.payload_tensors import flatten_tensor

BULK = 1 << 16  # bytes of a payload from which on shared memory is quicker than sending it
AHEAD = 1 << 15  # bytes of a read at least: so most frames of a decode step are one system call
SHORTEST = 1e-3  # seconds: none at all would mean not to wait, and what is there already is taken
ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL
FRAGMENTS = 512  # pieces of one system call; it takes no more than 1,024


class ConnectionBroken(Exception):
    """The connection is of no use any more, and why."""


class ConnectionEnded(ConnectionBroken):
    """The other end closed it, between two frames."""


@frozen(eq=False)
class WireFrame:
    """arguments: JSON. payload: read it before the next frame comes."""

    head: FrameHead
    arguments: bytes
    payload: memoryview


@define(eq=False)
class Shared:
    """Memory of both ends: what goes out, and what comes in; and what the server lends, or the daemon borrows."""

    out: memoryview
    into: memoryview
    lender: Lender | None = None
    borrower: Borrower | None = None


@define(eq=False)
class Channel:
    """Used by one thread at a time. limit: bytes of a payload that are accepted. why: it is of no use, if so."""

    socket: socket.socket
    limit: int = frames.MOST_PAYLOAD
    shared: Shared | None = None
    why: str = ""
    _until: float | None = None  # nothing is waited for longer, whatever deadline a frame has of its own
    _left: int | None = None  # bytes that frames may still have, heads and all
    _buffer: memoryview = field(factory=lambda: memoryview(bytearray(frames.MOST_PAYLOAD)))
    _ahead: memoryview = field(factory=lambda: memoryview(bytearray(AHEAD)))
    _here: memoryview = field(factory=lambda: memoryview(b""))  # of what was read ahead, what nobody has taken yet

    @property
    def lender(self) -> Lender | None:
        return None if self.shared is None else self.shared.lender

    def bound(self, seconds: float, most_bytes: int) -> None:
        """All that comes and goes until `unbind` takes so long, and is of so many bytes, together."""
        self._until = time.monotonic() + seconds
        self._left = most_bytes

    def unbind(self) -> None:
        self._until = self._left = None

    def send(
        self,
        op: int,
        request: int,
        arguments: bytes,
        tensors: Sequence[Tensor] = (),
        *,
        flags: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Raises Broken."""
        pieces = flatten_tensor(tensors)
        size = sum(piece.nbytes for piece in pieces)
        if self.shared is not None and BULK <= size <= self.shared.out.nbytes:
            at = 0
            for piece in pieces:
                self.shared.out[at : at + piece.nbytes] = piece
                at += piece.nbytes
            flags = flags | SHARED
            pieces = []
        head = frames.write_frame(FrameHead(op, flags, request, len(arguments), size), arguments, pieces)
        self._write([memoryview(head + arguments), *pieces], seconds)

    def receive(self, seconds: float, *, patient: bool = False) -> WireFrame:
        """The next frame, whole. patient: the time counts from its first byte on.

        Raises Broken; Ended where the other end has closed the connection and left nothing half said.
        """
        if self.why:
            raise ConnectionBroken(self.why)  # whatever was read ahead
        until = None if patient else time.monotonic() + seconds
        data = bytearray(HEAD.size)
        self._read(memoryview(data)[:1], until, begins=True)
        until = time.monotonic() + seconds if patient else until
        try:
            self._read(memoryview(data)[1:], until)
            head = frames.read(data, self.limit)
            self._take(HEAD.size + head.arguments + head.follows)
            arguments = bytearray(head.arguments)
            self._read(memoryview(arguments), until)
            if head.follows > self._buffer.nbytes:
                self._buffer = memoryview(bytearray(head.follows))
            payload = self._buffer[: head.follows]
            self._read(payload, until)
            frames.check(head, data, arguments, payload)
        except Malformed as error:
            raise self.broken(str(error)) from error
        if head.flags & SHARED:
            if self.shared is None or head.payload > self.shared.into.nbytes:
                raise self.broken(f"{head.payload} bytes in shared memory, which has not that much")
            payload = self.shared.into[: head.payload]
        return WireFrame(head, bytes(arguments), payload)

    def answer(self, op: int, request: int, seconds: float) -> WireFrame:
        """The frame that answers a request; any other one is a violation. Raises Broken."""
        frame = self.receive(seconds)
        head = frame.head
        if not head.flags & REPLY or (head.op, head.request) != (op, request):
            raise self.broken(f"an answer to {head.op} ({head.request}) where {op} ({request}) was asked")
        return frame

    @property
    def ended(self) -> bool:
        """By any thread, at once: has the other end closed the connection, or is it closed here?"""
        looking = select.poll()
        try:
            looking.register(self.socket, ENDED)
        except ValueError:  # closed here
            return True
        return any(happened & ENDED for _, happened in looking.poll(0))

    def broken(self, why: str) -> ConnectionBroken:
        """It is closed, for good."""
        self.close(why)
        return ConnectionBroken(self.why)

    def close(self, why: str = "closed here") -> None:
        if not self.why:
            self.why = why
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # whoever waits for it on another thread wakes up
            self.socket.close()

    def _take(self, nbytes: int) -> None:
        """Raises Malformed for a frame that is more than may come, before anything is made room for."""
        if self._left is None:
            return
        if nbytes > self._left:
            raise Malformed(f"a frame of {nbytes} bytes where {self._left} are left of a hello")
        self._left -= nbytes

    def _write(self, pieces: list[memoryview], seconds: float | None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        at = 0
        while at < len(pieces):
            sent = self._run_until(lambda: self.socket.sendmsg(pieces[at : at + FRAGMENTS]), until)  # noqa: B023 - called now
            while sent and sent >= pieces[at].nbytes:
                sent -= pieces[at].nbytes
                at += 1
            if sent:
                pieces[at] = pieces[at][sent:]

    def _read(self, into: memoryview, until: float | None, *, begins: bool = False) -> None:
        """What was read ahead, and the rest: what is short with all that has come behind it."""
        got = 0
        while True:
            taken = min(into.nbytes - got, self._here.nbytes)
            into[got : got + taken] = self._here[:taken]
            got = got + taken
            self._here = self._here[taken:]
            if got == into.nbytes:
                return
            short = into.nbytes - got < AHEAD
            place = self._ahead if short else into[got:]
            count = self._run_until(lambda: self.socket.recv_into(place), until)  # noqa: B023 - called now
            if not count:
                error = self.broken("the other end has closed the connection")
                raise ConnectionEnded(error.args[0]) if begins and not got else error
            if short:
                self._here = self._ahead[:count]
            else:
                got += count

    def _run_until(self, work: Callable[[], int], until: float | None) -> int:
        if self.why:
            raise ConnectionBroken(self.why)
        try:
            ends = [one for one in (until, self._until) if one is not None]
            left = min(ends) - time.monotonic() if ends else None
            self.socket.settimeout(None if left is None else max(left, SHORTEST))
            return work()
        except TimeoutError:
            raise self.broken("no answer in time") from None
        except OSError as error:
            raise self.broken(error.strerror or str(error)) from error


def is_failure(frame: WireFrame) -> bool:
    return bool(frame.head.flags & FAILED)


def failure(channel: Channel, frame: WireFrame) -> Exception:
    """What the other end failed with, as it would be raised here."""
    try:
        said = decode_message(frame.arguments, Failure)
    except Unacceptable as error:
        return channel.broken(str(error))
    if said.kind == "refused":
        return ValueError(said.why)
    return torch.OutOfMemoryError(said.why) if said.kind == "out_of_memory" else RuntimeError(said.why)
