"""The application of the ingress: it reads a request, lets the router choose a replica, and relays the answer.

The guard of the HTTP server stands before it, so a request is refused here for the same reasons and in the same words
as by a single server. A replica answers everything else.

A request is *pinned* if only one replica can answer it: the request names it (`find_pin`), or refers to a response that
this replica stores (`response_holders.py`). It is sent nowhere else.

Theory of operation for failures: a request goes to another replica as long as its client has no token
(`held_answer.py`). A request avoids the replicas that have failed or refused it. If a replica is lost before the client
has a token, all requests avoid it for a moment (`ReplicaPicker.shun`). If all replicas have been tried and the last one
is busy, the client gets its refusal. Otherwise the request waits and tries again, at most until `--request-timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import lru_cache

import anyio
from attrs import define, evolve, field, frozen
from prometheus_client import Counter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from adapters.http.answer.access_log import CALLER, NOTE
from adapters.http.answer.answer_shape import encode_event
from adapters.http.apis.registry import find_error_format
from adapters.http.edge_options import EdgeOptions
from adapters.http.page import files
from adapters.http.wire.body_budget import BodyBudget
from adapters.http.wire.error_format import ANTHROPIC
from adapters.http.wire.errors import SHUTTING_DOWN, ApiError, unavailable, unknown_path
from adapters.http.wire.read_body import read_bytes
from adapters.http.wire.until_disconnect import run_until_disconnect
from adapters.metrics import Metrics
from engine.fleet.ingress.direct_requests import DIRECT
from engine.fleet.ingress.fleet_status import FleetStatus
from engine.fleet.ingress.held_answer import HeldAnswer, ReplicaLost, find_header
from engine.fleet.ingress.key_finder import KeyFinder
from engine.fleet.ingress.merge_metrics import make_prefill_counter, make_repeat_counter
from engine.fleet.ingress.open_requests import OpenRequests
from engine.fleet.ingress.prompt_keys import APIS
from engine.fleet.ingress.relay import REPLICA_HEADER, AskedRequest, ReplicaClient, ReplicaRefused
from engine.fleet.ingress.remote_prefill import RemotePrefills
from engine.fleet.ingress.replica_picker import Replica, ReplicaChoice, ReplicaPicker
from engine.fleet.ingress.response_holders import ResponseHolders

log = logging.getLogger("rekindle.fleet")
FIRST_WAIT_S = 0.05  # before a request is sent again while no other replica is there
LONGEST_WAIT_S = 1.0
KEPT_BODIES = 32  # bodies of the largest size that an ingress keeps: 1 GiB at the default of --max-body
FLEET = "/fleet"
EVENTS = "/events"  # a stream without an end
READ_ONLY = frozenset({"GET", "HEAD"})


@frozen
class ServedPaths:
    """The paths that a fleet answers.

    whole: those without parameters, and patterns of all others (`/v1/responses/{response_id}`).
    """

    whole: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def __contains__(self, path: str) -> bool:
        return path in self.whole or any(pattern.match(path) for pattern in self.patterns)


@lru_cache(4)
def collect_paths(of_replica: tuple[str, ...]) -> ServedPaths:
    """Return the paths of a fleet. of_replica: what the server of a replica answers."""
    routes = frozenset({*of_replica, *files.load_files(), FLEET})
    return ServedPaths(routes, tuple(compile_path(route)[0] for route in routes if "{" in route))


@define(eq=False)
class IngressApp:
    """The handlers of one ingress, and the objects that they share."""

    picker: ReplicaPicker
    finder: KeyFinder
    options: EdgeOptions
    metrics: Metrics
    relay: ReplicaClient = field(factory=ReplicaClient)
    open_requests: OpenRequests = field(factory=OpenRequests)
    budget: BodyBudget = field(init=False)
    holders: ResponseHolders = field(init=False)
    status: FleetStatus = field(init=False)
    prefills: RemotePrefills = field(init=False)
    _repeats: Counter = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.budget = BodyBudget(KEPT_BODIES * self.options.limits.max_body, self.options.times.retry_after_s)
        self.holders = ResponseHolders(self.picker, self.relay)
        self.status = FleetStatus(self.picker, self.relay, self.metrics)
        self.prefills = RemotePrefills(self.picker, self.relay, make_prefill_counter(self.metrics.registry))
        self._repeats = make_repeat_counter(self.metrics.registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["path"]
        if (work := self._find_own_answer(path, request)) is not None:
            await (await work())(scope, receive, send)
            return
        newest = self.picker.newest or await self.picker.find_any()
        if path not in collect_paths(newest.facts.paths):
            raise unknown_path(path, sorted({*newest.facts.paths, FLEET}))
        if self.open_requests.is_draining:
            raise unavailable(SHUTTING_DOWN, self.options.times.retry_after_s)
        if self.open_requests.is_full:
            raise unavailable("The fleet answers as many requests as it can.", self.options.times.retry_after_s)
        # Nobody waits for the end of a stream of events: it has none.
        with nullcontext() if path == EVENTS else self.open_requests.hold():
            await self._read_and_answer(request, receive, send)

    async def _read_and_answer(self, request: Request, receive: Receive, send: Send) -> None:
        # The body is kept until the request is answered, since it may have to be sent again.
        with self.budget.open_body(self.options.times.body_timeout_s) as incoming:
            body = await read_bytes(request, self.options, self.budget, incoming)
            asked = await self._read_request(request, body)
            await run_until_disconnect(receive, lambda: self._answer(asked, request.scope, send))
        # The event loop of Ray Serve (uvloop) writes what was sent at the end of its turn. What follows can wait.
        await asyncio.sleep(0)
        if asked.read_later is not None:
            asked.read_later()

    def _find_own_answer(self, path: str, request: Request) -> Callable[[], Awaitable[Response]] | None:
        """Return what answers a request about the whole fleet; None: a replica answers it."""
        if request.method not in READ_ONLY or find_pin(request):
            return None
        headers = request.scope["headers"]
        own: dict[str, Callable[[], Awaitable[Response]]] = {
            FLEET: lambda: self.status.show_fleet(headers),
            "/health": lambda: self.status.show_health(headers, self.options.times.retry_after_s),
            "/metrics": lambda: self.status.render_metrics(headers),
        }
        return own.get(path)

    async def _read_request(self, request: Request, body: bytearray) -> AskedRequest:
        """Return the request, with the keys of its prompt or the replica that must answer it. Raises ApiError."""
        scope = request.scope
        query = scope["query_string"].decode("latin-1")
        asked = AskedRequest(
            method=request.method,
            path=scope["path"],
            target=scope["raw_path"].decode("latin-1") + (f"?{query}" if query else ""),
            headers=tuple(scope["headers"]),
            body=bytes(body),
            can_repeat=request.method != "DELETE" and scope["path"] != EVENTS,
        )
        if name := find_pin(request):
            return evolve(asked, pinned=await self._find_pinned(name))
        if (holder := await self.holders.find_holder(asked)) is not None:
            return evolve(asked, pinned=holder)
        if request.method != "POST" or scope["path"] not in APIS:
            return asked
        newest = self.picker.newest or await self.picker.find_any()
        found = await self.finder.find_keys(asked.path, body, scope.get(CALLER, ""), newest.facts)
        return evolve(asked, route=found.route, read_later=found.read_later)

    async def _find_pinned(self, name: str) -> Replica:
        found = next((replica for replica in await self.picker.list_replicas() if replica.id == name), None)
        if found is None:
            raise ApiError(404, f"There is no replica {name[:80]!r} (any more).", code="unknown_replica")
        return found

    async def _answer(self, asked: AskedRequest, scope: Scope, send: Send) -> None:
        """Send the request to one replica after another until one has answered it."""
        answer = HeldAnswer(send, asked.can_repeat, names_itself=DIRECT in scope)
        with anyio.move_on_after(self.options.times.request_timeout_s):
            await self._try_replicas(asked, answer, scope)
            return
        await self._give_up(answer, scope, ApiError(504, "No replica could answer in time.", "timeout_error"))

    async def _try_replicas(self, asked: AskedRequest, answer: HeldAnswer, scope: Scope) -> None:
        avoid = frozenset[str]()
        wait_s = FIRST_WAIT_S
        while True:
            choice = ReplicaChoice(asked.pinned) if asked.pinned else await self.picker.choose(asked.route, avoid)
            replica = choice.replica
            is_first = not avoid
            if replica.id in avoid:  # there is no other
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            avoid |= {replica.id}
            try:
                with self.picker.count_request(replica.id):
                    # Only once: what has failed for one replica would hold up the request again for the next one.
                    reader = await self.prefills.read_elsewhere(asked, choice) if is_first else ""
                    await self.relay.send(asked, replica, answer, reader)
            except ReplicaLost as error:
                if not answer.has_token:  # after one, the cause may be a client that does not read
                    self.picker.shun(replica.id)
                log.warning("replica %s is lost: %s", replica.id, error)
                if answer.has_token or not asked.can_repeat or asked.pinned:
                    await self._give_up(answer, scope, unavailable(f"The replica was lost: {error}"[:200], 1))
                    return
                self._repeats.labels("lost").inc()
            except ReplicaRefused as refusal:
                stops = SHUTTING_DOWN.encode() in refusal.body
                if asked.pinned or (not stops and await self._is_last(avoid)):
                    await send_refusal(refusal, answer)
                    return
                self._repeats.labels("stopping" if stops else "busy").inc()
            else:
                said = f" reader={reader}" if reader else ""
                scope[NOTE] = f" replica={replica.id} replicas_tried={len(avoid)}{said}"
                self.holders.note_answer(asked, answer, replica)
                return

    async def _is_last(self, asked_replicas: frozenset[str]) -> bool:
        """Return whether all replicas have been asked."""
        return {replica.id for replica in await self.picker.list_replicas()} <= asked_replicas

    async def _give_up(self, answer: HeldAnswer, scope: Scope, error: ApiError) -> None:
        """End the answer with an error in the format of its API."""
        error_format = find_error_format(scope)
        if answer.has_begun:
            name = "error" if error_format is ANTHROPIC else None
            await answer.fail(encode_event(error_format.make_body(error, answer.answer_id.decode()), name))
            return
        response = error_format.make_response(error)
        await answer.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await answer.send({"type": "http.response.body", "body": response.body, "more_body": False})


async def send_refusal(refusal: ReplicaRefused, answer: HeldAnswer) -> None:
    """Send the client the refusal of the last replica that was asked."""
    await answer.begin(refusal.status, refusal.headers)
    await answer.add(refusal.body)
    await answer.finish()


def find_pin(request: Request) -> str:
    """Return the id of the replica that a request names, in its header or in its query; empty if it names none."""
    named = find_header(request.scope["headers"], REPLICA_HEADER).decode("latin-1")
    query = request.scope["query_string"]
    return named or (QueryParams(query).get("replica", "") if query else "")
