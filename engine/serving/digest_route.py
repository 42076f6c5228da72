"""The route on which the router of a fleet hears what this server holds."""

from __future__ import annotations

import time

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.core.block_digests import DIGEST_PATH, DigestSource
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import Engine


def make_digest_route(running: Engine, target: LoadedModel) -> Route:
    """Return the route of digests. Each answer is made on a thread, from the world as it is then."""
    store = None if target.transfer is None else target.transfer.store
    source = DigestSource(target.identity, store, time.time_ns(), time.monotonic_ns)

    async def tell_digests(_: Request) -> Response:
        message = await to_thread.run_sync(source.take_message, running.submissions.read_world())
        return Response(message, media_type="application/vnd.msgpack")

    return Route(DIGEST_PATH, tell_digests)
