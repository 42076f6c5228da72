"""Sends a request to one replica, and reads its answer. The HTTP server of a replica is that of `rekindle serve`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from attrs import define, field, frozen

from engine.fleet.ingress.held_answer import HeldAnswer, RawHeaders
from engine.fleet.ingress.replica_connection import ConnectionPool, ReplicaConnection, ReplicaRequest, parse_address
from engine.fleet.ingress.replica_picker import Replica
from engine.fleet.replica_facts import ReplicaFacts
from engine.fleet.router.route_keys import RouteKeys

REPLICA_HEADER = b"x-rekindle-replica"
READER_HEADER = b"x-rekindle-reader"  # the replica that has read the prompt for the one that answers
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"host"})  # headers with which a replica lets a caller in
# Headers of one hop, and those that each hop writes itself.
REQUEST_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
    | {b"content-length", b"expect"}
)
RESPONSE_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date"})
REFUSALS = frozenset({429, 503, 529})  # statuses that another replica need not have


@frozen
class AskedRequest:
    """A request as its client sent it, with its whole body.

    path: the path that is served. target: path and query as sent. can_repeat: it may be sent more than once, as it
    only generates or reads. pinned: the only replica that can answer it, if any. read_later: called when it has been
    answered; it reads the prompt for the conversation's next request.
    """

    method: str
    path: str
    target: str
    headers: RawHeaders
    body: bytes
    can_repeat: bool
    route: RouteKeys | None = None
    pinned: Replica | None = None
    read_later: Callable[[], None] | None = None


@frozen
class ReplicaRefused(Exception):
    """The answer of a replica that takes no request now."""

    replica: str
    status: int
    headers: RawHeaders
    body: bytes


@define(eq=False)
class ReplicaClient:
    """The connections of an ingress to replicas. Used in one event loop."""

    pool: ConnectionPool = field(factory=ConnectionPool, init=False)

    async def send(self, asked: AskedRequest, replica: Replica, answer: HeldAnswer, reader: str = "") -> None:
        """Send a request to a replica, and its answer to the client. reader: the id of the replica that has read the
        prompt for this one; "": none.

        Raises ReplicaLost if the replica went away. Raises ReplicaRefused if it takes no request now.
        """
        request = ReplicaRequest(asked.method, asked.target, keep_request_headers(asked.headers), asked.body)
        async with self._ask(replica.facts, request) as response:
            headers = keep_response_headers(response.headers, replica)
            if reader:
                headers.append((READER_HEADER, reader.encode()))
            if response.status in REFUSALS:
                raise ReplicaRefused(replica.id, response.status, headers, await read_whole(response))
            await answer.begin(response.status, headers)
            async for part in response.read_parts():
                await answer.add(part)
        await answer.finish()

    async def get(self, facts: ReplicaFacts, target: str, headers: RawHeaders) -> tuple[int, RawHeaders, bytes]:
        """Return status, headers and body of a GET. Raises ReplicaLost."""
        async with self._ask(facts, ReplicaRequest("GET", target, headers)) as response:
            return response.status, response.headers, await read_whole(response)

    async def post(self, facts: ReplicaFacts, target: str, headers: RawHeaders, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST. headers: as a client has sent them. Raises ReplicaLost."""
        async with self._ask(facts, ReplicaRequest("POST", target, keep_request_headers(headers), body)) as response:
            return response.status, await read_whole(response)

    async def close(self) -> None:
        """Close all connections that are idle."""
        self.pool.close()

    @asynccontextmanager
    async def _ask(self, facts: ReplicaFacts, request: ReplicaRequest) -> AsyncIterator[ReplicaConnection]:
        """Yield the connection on which the head of the answer has arrived. Raises ReplicaLost."""
        address = parse_address(facts.url)
        connection = await self.pool.open(address)
        with self.pool.lend(connection, address):
            await connection.send(request, facts.url.removeprefix("http://"))
            yield connection


async def read_whole(response: ReplicaConnection) -> bytes:
    """Return the body of an answer. Raises ReplicaLost if it is cut short."""
    return b"".join([part async for part in response.read_parts()])


def keep_request_headers(headers: RawHeaders) -> RawHeaders:
    """Return the headers that a replica gets: those of the client, without those of its connection."""
    return [(name, value) for name, value in headers if name not in REQUEST_HEADERS]


def keep_response_headers(headers: RawHeaders, replica: Replica) -> list[tuple[bytes, bytes]]:
    """Return the headers that a client gets, with the replica's id."""
    kept = [(name, value) for name, value in headers if name not in RESPONSE_HEADERS]
    return [*kept, (REPLICA_HEADER, replica.id.encode())]
