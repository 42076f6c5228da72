"""The answer that a client gets, held back while its request may still go to another replica.

An answer that is no stream is held until it is whole. A stream is held until its first token, or until the replica
sends a sign of life, because a client waits only so long for one. If a replica is lost after that and before a token,
the stream of the next replica continues the one that has begun: its opening is left out, and its id is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from attrs import define, field
from starlette.types import Send

from engine.fleet.ingress.stream_events import END, EventKind, classify_event

RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]
STREAM_TYPE = b"text/event-stream"
ID_HEADER = b"x-request-id"


class ReplicaLost(Exception):
    """A replica went away before the client had a token. The message says how."""


def find_header(headers: RawHeaders, name: bytes) -> bytes:
    """Return the value of a header; empty if there is none. Names are in lower case."""
    return next((value for key, value in headers if key == name), b"")


@define(eq=False)
class HeldAnswer:
    """The answer to one request, from one replica after another until one of them has given a token.

    can_repeat: the request may be sent to another replica. If not, a stream is passed on from its beginning.
    names_itself: the client gets the header with the answer's id. Ray Serve's own layer adds a header of this name with
    an id of its own, and a response has one such header.
    has_begun: the client has the status line. has_token: the client has a part of the answer, so no other replica may
    be asked.
    """

    send: Send
    can_repeat: bool
    names_itself: bool = False
    has_begun: bool = field(default=False, init=False)
    has_token: bool = field(default=False, init=False)
    answer_id: bytes = field(default=b"", init=False)  # as the client knows it
    _id: bytes = field(default=b"", init=False)  # as the replica has it that answers now
    _status: int = field(default=0, init=False)
    _headers: RawHeaders = field(default=(), init=False)
    _is_stream: bool = field(default=False, init=False)
    _held: list[bytes] = field(factory=list, init=False)
    _rest: bytes = field(default=b"", init=False)  # the beginning of an event
    _seen: set[bytes] = field(factory=set, init=False)  # openings of the replica that answers now

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Take the status line and the headers of a replica."""
        self._status = status
        self._headers = headers
        self._is_stream = find_header(headers, b"content-type").startswith(STREAM_TYPE)
        self._id = find_header(headers, ID_HEADER)
        self._held = []
        self._rest = b""
        self._seen = set()
        if self._is_stream and not self.can_repeat:
            self.has_token = True
            await self._begin()

    async def add(self, part: bytes) -> None:
        """Take a part of the body. Raises ReplicaLost if the stream says that its replica stops."""
        if not self._is_stream:
            self._held.append(part)
        elif self.has_token and self._id == self.answer_id:
            await self._send(part)
        else:
            *events, self._rest = (self._rest + part).split(END)
            await self._add_events(event + END for event in events)

    async def finish(self) -> None:
        """End the answer, which is complete."""
        body = b"".join((*self._held, self._rest))
        self._held = []
        if body and not self.has_begun:
            self._headers = [*self._headers, (b"content-length", b"%d" % len(body))]
        await self._begin()
        await self.send({"type": "http.response.body", "body": self._rename(body), "more_body": False})

    async def fail(self, event: bytes) -> None:
        """End a stream that cannot be continued. event: tells the client why."""
        await self.send({"type": "http.response.body", "body": event, "more_body": False})

    async def _add_events(self, events: Iterable[bytes]) -> None:
        """Take whole events of a stream, and send those that the client may have.

        Openings are held until the next sign of life or token. Once the client's stream has begun, further openings
        are dropped, so that the client does not get those of a second replica as well. After the first token every
        event is sent. Raises ReplicaLost, and sends none of these events, if the replica says before a token that it
        stops.
        """
        ready = list[bytes]()
        for event in events:
            kind = EventKind.TOKEN if self.has_token else self._classify(event)
            if kind is EventKind.LOST:
                raise ReplicaLost("the replica ended the stream before its first token")
            if kind is EventKind.OPENING:
                if not self.has_begun:
                    self._held.append(event)
                continue
            ready += [*self._held, event]
            self._held = []
            self.has_token = self.has_token or kind is EventKind.TOKEN
        if ready:
            await self._send(b"".join(ready))

    def _classify(self, event: bytes) -> EventKind:
        """Return what an event means.

        A replica repeats some openings, such as `ping`, to show that it is alive. So an opening that it has sent before
        counts as a sign of life. An event that begins with `event:` is compared by that line, any other as a whole.
        """
        kind = classify_event(event)
        if kind is not EventKind.OPENING:
            return kind
        name = event.partition(b"\n")[0] if event.startswith(b"event:") else event
        if name in self._seen:
            return EventKind.IDLE
        self._seen.add(name)
        return kind

    async def _send(self, body: bytes) -> None:
        await self._begin()
        await self.send({"type": "http.response.body", "body": self._rename(body), "more_body": True})

    async def _begin(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        self.answer_id = self._id
        headers = [header for header in self._headers if self.names_itself or header[0] != ID_HEADER]
        await self.send({"type": "http.response.start", "status": self._status, "headers": headers})

    def _rename(self, body: bytes) -> bytes:
        """Return a part of the body with the answer's id as the client knows it."""
        if self._id == self.answer_id or not self._id:
            return body
        return body.replace(self._id, self.answer_id)
