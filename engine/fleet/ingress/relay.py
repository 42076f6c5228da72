"""Sends a request to one replica, and reads its answer. The HTTP server of a replica is that of `rekindle serve`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import aiohttp
from attrs import define, field, frozen
from yarl import URL

from engine.fleet.ingress.held_answer import HeldAnswer, RawHeaders, ReplicaLost
from engine.fleet.ingress.replica_picker import Replica
from engine.fleet.replica_facts import ReplicaFacts
from engine.fleet.router.route_keys import RouteKeys

REPLICA_HEADER = b"x-rekindle-replica"
READER_HEADER = b"x-rekindle-reader"  # the replica that has read the prompt for the one that answers
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"host"})  # headers with which a replica lets a caller in
CONNECT_S = 5.0
IDLE_S = 60.0  # less than the 75 s after which a replica closes an idle connection
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

    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP client, which is made inside the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=1 << 16,
                max_field_size=1 << 16,
            )
        return self._session

    async def send(self, asked: AskedRequest, replica: Replica, answer: HeldAnswer, reader: str = "") -> None:
        """Send a request to a replica, and its answer to the client. reader: the id of the replica that has read the
        prompt for this one; "": none.

        Raises ReplicaLost if the replica went away. Raises ReplicaRefused if it takes no request now.
        """
        request = self.session.request(
            asked.method,
            URL(replica.facts.url + asked.target, encoded=True),
            headers=decode_headers(keep_request_headers(asked.headers)),
            data=asked.body or None,
            allow_redirects=False,
        )
        try:
            response = await request
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(describe_error(error)) from error
        async with response:
            headers = keep_response_headers(response, replica)
            if reader:
                headers = [*headers, (READER_HEADER, reader.encode())]
            if response.status in REFUSALS:
                body = b"".join([part async for part in read_parts(response)])
                raise ReplicaRefused(replica.id, response.status, headers, body)
            await answer.begin(response.status, headers)
            async for part in read_parts(response):
                await answer.add(part)
        await answer.finish()

    async def get(self, facts: ReplicaFacts, target: str, headers: RawHeaders) -> tuple[int, RawHeaders, bytes]:
        """Return status, headers and body of a GET. Raises ReplicaLost."""
        try:
            async with self.session.get(
                URL(facts.url + target, encoded=True), headers=decode_headers(headers)
            ) as response:
                return response.status, response.raw_headers, await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(describe_error(error)) from error

    async def post(self, facts: ReplicaFacts, target: str, headers: RawHeaders, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST. headers: as a client has sent them. Raises ReplicaLost."""
        kept = decode_headers(keep_request_headers(headers))
        try:
            async with self.session.post(URL(facts.url + target, encoded=True), headers=kept, data=body) as response:
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(describe_error(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()


async def read_parts(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive. Raises ReplicaLost if it is cut short."""
    try:
        async for part in response.content.iter_any():
            yield part
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise ReplicaLost(describe_error(error)) from error


def keep_request_headers(headers: RawHeaders) -> RawHeaders:
    """Return the headers that a replica gets: those of the client, without those of its connection."""
    return [(name, value) for name, value in headers if name not in REQUEST_HEADERS]


def decode_headers(headers: RawHeaders) -> list[tuple[str, str]]:
    """Return headers as the HTTP client takes them."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def keep_response_headers(response: aiohttp.ClientResponse, replica: Replica) -> RawHeaders:
    """Return the headers that a client gets, with the replica's id."""
    kept = [(name.lower(), value) for name, value in response.raw_headers]
    return [
        *((name, value) for name, value in kept if name not in RESPONSE_HEADERS),
        (REPLICA_HEADER, replica.id.encode()),
    ]


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
