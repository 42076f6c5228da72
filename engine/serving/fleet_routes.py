"""The routes of a server that only the fleet around it uses: what it holds, and prompts that it reads for others.

They stand behind the same guard as all routes, so where there are API keys, a caller needs one. A prompt is read with
the salt of the caller's own key. So the rows of one caller are never found by another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.http.answer.access_log import CALLER
from adapters.http.app import Edge
from adapters.http.request.controls import separate_salt
from adapters.http.wire.body_budget import CLOSE_HEADERS
from adapters.http.wire.errors import ApiError, client_gone, find_failure, invalid, unavailable
from adapters.http.wire.read_body import read_bytes
from adapters.http.wire.until_disconnect import run_until_disconnect
from adapters.store.shared.shared_tier import SharedTier
from engine.core.block_digests import DigestSource
from engine.core.fleet_paths import API_PARAMETER, DIGEST_PATH, PROMPT_PATH, READ_PATH, REFRESH_PATH
from engine.core.submission import Submissions
from engine.loading.load_target import LoadedModel
from engine.serving.prompt_publisher import (
    PromptPublisher,
    PublishedPrompt,
    describe_prompt,
    make_reading_job,
    read_order,
)

MEDIA_TYPE = "application/vnd.msgpack"


def make_fleet_routes(submissions: Submissions, target: LoadedModel) -> Callable[[Edge], list[Route]]:
    """Return a function that makes the routes. Those of prompts are there only with a shared tier."""
    store = None if target.transfer is None else target.transfer.store
    source = DigestSource(target.identity, store, time.time_ns(), time.monotonic_ns)
    routes = [make_digest_route(submissions, source)]
    tier = None if store is None else store.find_tier(SharedTier)
    if store is None or tier is None:
        return lambda _: routes
    publisher = PromptPublisher(submissions, store, tier)
    return lambda edge: [
        *routes,
        make_prompt_route(edge),
        make_reading_route(edge, publisher),
        make_refresh_route(tier),
    ]


def make_digest_route(submissions: Submissions, source: DigestSource) -> Route:
    """Return the route of digests. Each answer is made on a thread, from the world as it is then."""

    async def show_digests(_: Request) -> Response:
        message = await to_thread.run_sync(source.take_message, submissions.read_world())
        return Response(message, media_type=MEDIA_TYPE)

    return Route(DIGEST_PATH, show_digests)


def make_prompt_route(edge: Edge) -> Route:
    """Return the route that describes the first prompt of a request, so that another server can read it.

    The request's body and headers are those for the API that the query names; they have the same limits.
    """

    async def describe(request: Request) -> Response:
        api = edge.find_api(request.query_params.get(API_PARAMETER, ""), request)
        if api is None:
            raise invalid(API_PARAMETER, "must be the path of an API for generating text")
        parsed = await edge.parse_request(api, request)
        order = describe_prompt(parsed, edge.plan_jobs(parsed, request.scope.get(CALLER, "")))
        if order is None:
            raise ApiError(409, "Nothing of this prompt can be read elsewhere.", code="not_readable")
        return Response(msgspec.msgpack.encode(order), media_type=MEDIA_TYPE)

    return Route(PROMPT_PATH, describe, methods=["POST"])


def make_reading_route(edge: Edge, publisher: PromptPublisher) -> Route:
    """Return the route that reads a prompt which another server has described, and answers when its rows are in the
    shared tier.
    """
    options = edge.options

    async def read_prompt(request: Request) -> Response:
        if publisher.submissions.get_acceptance() != "ready":
            raise unavailable("This server takes no prompt now.", 1)
        with edge.body_budget.open_body(options.times.body_timeout_s) as incoming:
            message = await read_bytes(request, options, edge.body_budget, incoming)
            try:
                order = read_order(message, options.model.vocab, options.model.max_ctx)
            except ValueError as error:
                raise invalid("$", str(error)[:200]) from error
        job = make_reading_job(order, separate_salt(order.salt, request.scope.get(CALLER, "")))
        found = list[PublishedPrompt]()

        async def publish() -> None:
            found.append(await publisher.publish(job))

        await run_until_disconnect(request.receive, publish)
        if not found:
            raise client_gone()
        if (failure := find_failure(found[0].closed, 1)) is not None:
            raise failure
        return JSONResponse({"prompt_tokens": len(job.prompt), "published_tokens": found[0].tokens})

    return Route(READ_PATH, read_prompt, methods=["POST"])


def make_refresh_route(tier: SharedTier) -> Route:
    """Return the route that lists the shared tier at once, so that what others have just published is found."""

    async def refresh(request: Request) -> Response:
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            raise ApiError(413, "This path takes no body.", code="body_too_large", headers=CLOSE_HEADERS)
        if not await asyncio.wrap_future(tier.request_refresh()):
            raise unavailable("The shared tier cannot be used now.", 1)
        return JSONResponse({"status": "ok"})

    return Route(REFRESH_PATH, refresh, methods=["POST"])
