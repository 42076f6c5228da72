"""Responses by their ids: shown again, cancelled, deleted, and the items that they answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import anyio
from attrs import define, field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.http.answer.access_log import CALLER
from adapters.http.answer.reply import Reply
from adapters.http.apis.api import Api, Counter
from adapters.http.apis.openai_response_answer import ResponseShape
from adapters.http.apis.openai_responses import PATH, compactions, response_tokens, responses
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ENCODER, Archive, ArchivedResponse, ResponseFolder, read
from adapters.http.wire.errors import ApiError, invalid
from adapters.http.wire.read_body import parsers

Generate: TypeAlias = Callable[[Api, Request], Awaitable[Reply]]
Count: TypeAlias = Callable[[Counter, Request], Awaitable[JSONResponse]]

ONE = f"{PATH}/{{id}}"
MOST_LISTED = 100


@define(eq=False)
class KeptResponses:
    """Each caller has their own. running: those that are being answered."""

    archive: Archive
    options: EdgeOptions
    running: MutableMapping[str, Reply] = field(factory=WeakValueDictionary)

    def routes(self, generate: Generate, count: Count) -> list[Route]:
        """generate, count: how the server does it for any API."""

        async def respond(request: Request) -> Reply:
            reply = await generate(responses(self.shelf(request)), request)
            self.running[reply.shape.id] = reply
            return reply

        async def compact(request: Request) -> Reply:
            return await generate(compactions(self.shelf(request)), request)

        async def tokens(request: Request) -> JSONResponse:
            return await count(response_tokens(self.shelf(request)), request)

        return [
            Route(PATH, respond, methods=["POST"]),
            Route(f"{PATH}/compact", compact, methods=["POST"]),
            Route(f"{PATH}/input_tokens", tokens, methods=["POST"]),
            Route(ONE, self.show, methods=["GET"]),
            Route(ONE, self.delete, methods=["DELETE"]),
            Route(f"{ONE}/cancel", self.cancel, methods=["POST"]),
            Route(f"{ONE}/input_items", self.list_items, methods=["GET"]),
        ]

    def shelf(self, request: Request) -> ResponseFolder:
        return ResponseFolder(self.archive, request.scope.get(CALLER, ""))

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise invalid("stream", "is not supported here: a response is shown as it is")
        name = request.path_params["id"]
        if (shape := self.shape_of(request, name)) is not None:
            return JSONResponse(shape.response())
        return written((await self.find(request, name)).response)

    async def delete(self, request: Request) -> JSONResponse:
        name = request.path_params["id"]
        if not self.shelf(request).drop(name):
            raise unknown(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> JSONResponse:
        name = request.path_params["id"]
        shape = self.shape_of(request, name)
        if shape is None:
            kept = await self.find(request, name)
            status = kept.response.get("status")
            raise invalid("id", f"the response is {status!r}; only one that is in progress can be cancelled")
        self.running[name].cancel()
        return JSONResponse({**shape.response(), "status": "cancelled"})

    async def list_items(self, request: Request) -> Response:
        name, asked = request.path_params["id"], request.query_params
        limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
        if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MOST_LISTED:
            raise invalid("limit", f"must be an integer from 1 to {MOST_LISTED}")
        if order not in ("asc", "desc"):
            raise invalid("order", "must be 'asc' or 'desc'")
        items = [named(name, place, item) for place, item in enumerate((await self.find(request, name)).items)]
        if order == "desc":
            items.reverse()
        if after is not None:
            if after not in (names := [item["id"] for item in items]):
                raise invalid("after", "is the id of none of these items")
            items = items[names.index(after) + 1 :]
        found = items[: int(limit)]
        first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
        more = {"first_id": first, "last_id": last, "has_more": len(items) > len(found)}
        return written({"object": "list", "data": found, **more})

    def shape_of(self, request: Request, name: str) -> ResponseShape | None:
        """Of one that is being answered."""
        reply = self.running.get(name)
        shape = None if reply is None else reply.shape
        if not isinstance(shape, ResponseShape) or shape.shelf.owner != self.shelf(request).owner:
            return None
        return shape if shape.status == "in_progress" else None

    async def find(self, request: Request, name: str) -> ArchivedResponse:
        raw = self.shelf(request).find(name)
        if raw is None:
            raise unknown(name)
        try:
            # a request of a line may ask for as much as a body has: one at a time, as with those
            return await anyio.to_thread.run_sync(read, raw, self.options, limiter=parsers())
        except ValueError:
            raise unknown(name) from None


def named(response: str, place: int, item: Any) -> Mapping[str, Any]:
    """Items that came without an id get one."""
    told = item if isinstance(item, dict) else {}
    return {"id": f"in_{response.removeprefix('resp_')}{place:04x}", "type": "message", **told}


def written(found: Mapping[str, Any]) -> Response:
    """As large as a body may be, so in a tenth of the time that JSONResponse takes."""
    return Response(ENCODER.encode(found), media_type="application/json")


def unknown(name: str) -> ApiError:
    message = f"There is no response {name[:80]!r} here (any more), or it was sent with `store: false`."
    return ApiError(404, message, param="id", code="not_found")
