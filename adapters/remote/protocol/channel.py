"""One connection between a server and a shard's daemon: frames in and out, each by its deadline.

Every fault ends the connection for good: a malformed frame, a frame that comes late, an end that is gone. Nothing is
sent or read afterwards, so a late answer is never taken for the answer to another question.
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

BULK = 1 << 16  # bytes; from this size on, a payload crosses faster through shared memory than over the socket
AHEAD = 1 << 15  # bytes asked for by a short read, so that most frames of a decode step take one system call
SHORTEST = 1e-3  # seconds, the shortest timeout: a timeout of 0 would make the socket non-blocking
ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL
FRAGMENTS = 512  # pieces of one system call; it takes no more than 1,024


class ConnectionBroken(Exception):
    """The connection cannot be used any more. The message says why."""


class ConnectionEnded(ConnectionBroken):
    """The other end closed the connection between two frames."""


@frozen(eq=False)
class WireFrame:
    """A received frame. arguments: JSON. payload: valid only until the next frame is received."""

    head: FrameHead
    arguments: bytes
    payload: memoryview


@define(eq=False)
class Shared:
    """Shared memory of a connection.

    out, into: for payloads that this end sends and receives. lender: memory that the server lends (on the server only).
    borrower: the same memory as the daemon reads it (on the daemon only).
    """

    out: memoryview
    into: memoryview
    lender: Lender | None = None
    borrower: Borrower | None = None


@define(eq=False)
class Channel:
    """One end of a connection, used by one thread at a time.

    limit: the largest payload that is accepted, in bytes. why: the reason why the connection has ended; empty until
    then.
    """

    socket: socket.socket
    limit: int = frames.MOST_PAYLOAD
    shared: Shared | None = None
    why: str = ""
    _until: float | None = None  # a deadline for all frames together, beyond the deadline of each
    _left: int | None = None  # bytes that frames may still have until `clear_limits`, heads included
    _buffer: memoryview = field(factory=lambda: memoryview(bytearray(frames.MOST_PAYLOAD)))
    _ahead: memoryview = field(factory=lambda: memoryview(bytearray(AHEAD)))
    _here: memoryview = field(factory=lambda: memoryview(b""))  # the part of `_ahead` that no frame has taken yet

    @property
    def lender(self) -> Lender | None:
        return None if self.shared is None else self.shared.lender

    def set_limits(self, seconds: float, most_bytes: int) -> None:
        """Limit the time of all frames until `clear_limits`, and the bytes of all received ones, together."""
        self._until = time.monotonic() + seconds
        self._left = most_bytes

    def clear_limits(self) -> None:
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
        """Send one frame. Raises ConnectionBroken.

        A large payload goes through shared memory, if there is some and it has room.
        """
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
        """Receive one whole frame. patient: `seconds` begin with its first byte.

        Raises ConnectionBroken. Raises ConnectionEnded if the other end closed the connection between two frames.
        """
        # Bytes that were read ahead must not be taken for a frame after the connection has ended.
        if self.why:
            raise ConnectionBroken(self.why)
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
            raise self.abort(str(error)) from error
        if head.flags & SHARED:
            if self.shared is None or head.payload > self.shared.into.nbytes:
                raise self.abort(f"{head.payload} bytes in shared memory, which has not that much")
            payload = self.shared.into[: head.payload]
        return WireFrame(head, bytes(arguments), payload)

    def answer(self, op: int, request: int, seconds: float) -> WireFrame:
        """Receive the frame that answers a request. Raises ConnectionBroken, also for any other frame."""
        frame = self.receive(seconds)
        head = frame.head
        if not head.flags & REPLY or (head.op, head.request) != (op, request):
            raise self.abort(f"an answer to {head.op} ({head.request}) where {op} ({request}) was asked")
        return frame

    @property
    def has_ended(self) -> bool:
        """Has either end closed the connection? Does not wait. May be called on any thread."""
        looking = select.poll()
        try:
            looking.register(self.socket, ENDED)
        except ValueError:  # closed here
            return True
        return any(happened & ENDED for _, happened in looking.poll(0))

    def abort(self, why: str) -> ConnectionBroken:
        """Close the connection for good, and return the error to raise."""
        self.close(why)
        return ConnectionBroken(self.why)

    def close(self, why: str = "closed here") -> None:
        if not self.why:
            self.why = why
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the socket
            self.socket.close()

    def _take(self, nbytes: int) -> None:
        """Count the bytes of a frame. Raises Malformed before memory is allocated for a frame that is too large."""
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
        """Fill `into`, first from the bytes that were read ahead, then from the socket.

        A short rest is read together with all bytes behind it, which stay in `_ahead` for the next call.
        begins: `into` is the beginning of a frame, so an end of the connection there is an orderly one.
        """
        got = 0
        while True:
            taken = min(into.nbytes - got, self._here.nbytes)
            into[got : got + taken] = self._here[:taken]
            got = got + taken
            self._here = self._here[taken:]
            if got == into.nbytes:
                return
            short = into.nbytes - got < AHEAD
            target = self._ahead if short else into[got:]
            count = self._run_until(lambda: self.socket.recv_into(target), until)  # noqa: B023 - called now
            if not count:
                error = self.abort("the other end has closed the connection")
                raise ConnectionEnded(error.args[0]) if begins and not got else error
            if short:
                self._here = self._ahead[:count]
            else:
                got += count

    def _run_until(self, work: Callable[[], int], until: float | None) -> int:
        """Run one operation of the socket within its deadline, and return its result. Raises ConnectionBroken."""
        if self.why:
            raise ConnectionBroken(self.why)
        try:
            ends = [end for end in (until, self._until) if end is not None]
            left = min(ends) - time.monotonic() if ends else None
            self.socket.settimeout(None if left is None else max(left, SHORTEST))
            return work()
        except TimeoutError:
            raise self.abort("no answer in time") from None
        except OSError as error:
            raise self.abort(error.strerror or str(error)) from error


def is_failure(frame: WireFrame) -> bool:
    return bool(frame.head.flags & FAILED)


def read_failure(channel: Channel, frame: WireFrame) -> Exception:
    """Return the error that a failure frame describes, as it would have been raised here."""
    try:
        said = decode_message(frame.arguments, Failure)
    except Unacceptable as error:
        return channel.abort(str(error))
    if said.kind == "refused":
        return ValueError(said.why)
    return torch.OutOfMemoryError(said.why) if said.kind == "out_of_memory" else RuntimeError(said.why)
