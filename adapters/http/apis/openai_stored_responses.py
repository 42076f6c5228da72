"""Serve stored responses by their ids: show, cancel and delete them, and list their input items."""

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
from adapters.http.apis.api import Api, TokenCounter
from adapters.http.apis.openai_response_answer import ResponseShape
from adapters.http.apis.openai_responses import PATH, make_compactions_api, make_responses_api, make_token_counter
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.response_store import ENCODER, ResponseFolder, ResponseStore, StoredResponse, decode_response
from adapters.http.wire.errors import ApiError, invalid
from adapters.http.wire.read_body import parser_limiter

Generate: TypeAlias = Callable[[Api[Any], Request], Awaitable[Reply]]
Count: TypeAlias = Callable[[TokenCounter, Request], Awaitable[JSONResponse]]

RESPONSE_PATH = f"{PATH}/{{id}}"
MAX_LISTED = 100


@define(eq=False)
class StoredResponses:
    """The routes of the Responses API. Each caller has its own responses. running_replies: those that are being
    answered.
    """

    responses: ResponseStore
    options: EdgeOptions
    running_replies: MutableMapping[str, Reply] = field(factory=WeakValueDictionary)

    def make_routes(self, generate: Generate, count: Count) -> list[Route]:
        """Return the routes. generate, count: how the server does it for any API."""

        async def respond(request: Request) -> Reply:
            reply = await generate(make_responses_api(self.find_folder(request)), request)
            self.running_replies[reply.shape.id] = reply
            return reply

        async def compact(request: Request) -> Reply:
            return await generate(make_compactions_api(self.find_folder(request)), request)

        async def tokens(request: Request) -> JSONResponse:
            return await count(make_token_counter(self.find_folder(request)), request)

        return [
            Route(PATH, respond, methods=["POST"]),
            Route(f"{PATH}/compact", compact, methods=["POST"]),
            Route(f"{PATH}/input_tokens", tokens, methods=["POST"]),
            Route(RESPONSE_PATH, self.show, methods=["GET"]),
            Route(RESPONSE_PATH, self.delete, methods=["DELETE"]),
            Route(f"{RESPONSE_PATH}/cancel", self.cancel, methods=["POST"]),
            Route(f"{RESPONSE_PATH}/input_items", self.list_items, methods=["GET"]),
        ]

    def find_folder(self, request: Request) -> ResponseFolder:
        return ResponseFolder(self.responses, request.scope.get(CALLER, ""))

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise invalid("stream", "is not supported here: a response is shown as it is")
        name = request.path_params["id"]
        if (shape := self.find_running_shape(request, name)) is not None:
            return JSONResponse(shape.make_response())
        return make_json_response((await self.load_response(request, name)).response)

    async def delete(self, request: Request) -> JSONResponse:
        name = request.path_params["id"]
        if not self.find_folder(request).remove(name):
            raise not_found(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> JSONResponse:
        name = request.path_params["id"]
        shape = self.find_running_shape(request, name)
        if shape is None:
            kept = await self.load_response(request, name)
            status = kept.response.get("status")
            raise invalid("id", f"the response is {status!r}; only one that is in progress can be cancelled")
        self.running_replies[name].cancel()
        return JSONResponse({**shape.make_response(), "status": "cancelled"})

    async def list_items(self, request: Request) -> Response:
        name = request.path_params["id"]
        asked = request.query_params
        limit = asked.get("limit", "20")
        order = asked.get("order", "desc")
        after = asked.get("after")
        if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_LISTED:
            raise invalid("limit", f"must be an integer from 1 to {MAX_LISTED}")
        if order not in ("asc", "desc"):
            raise invalid("order", "must be 'asc' or 'desc'")
        items = [
            add_item_id(name, index, item) for index, item in enumerate((await self.load_response(request, name)).items)
        ]
        if order == "desc":
            items.reverse()
        if after is not None:
            if after not in (names := [item["id"] for item in items]):
                raise invalid("after", "is the id of none of these items")
            items = items[names.index(after) + 1 :]
        found = items[: int(limit)]
        first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
        more = {"first_id": first, "last_id": last, "has_more": len(items) > len(found)}
        return make_json_response({"object": "list", "data": found, **more})

    def find_running_shape(self, request: Request, name: str) -> ResponseShape | None:
        """Return the shape of a response that is being answered to this caller."""
        reply = self.running_replies.get(name)
        shape = None if reply is None else reply.shape
        if not isinstance(shape, ResponseShape) or shape.folder.owner != self.find_folder(request).owner:
            return None
        return shape if shape.status == "in_progress" else None

    async def load_response(self, request: Request, name: str) -> StoredResponse:
        raw = self.find_folder(request).find(name)
        if raw is None:
            raise not_found(name)
        try:
            # A short request may ask for a response as large as a body: one at a time, as with bodies.
            return await anyio.to_thread.run_sync(decode_response, raw, self.options, limiter=parser_limiter())
        except ValueError:
            raise not_found(name) from None


def add_item_id(response: str, index: int, item: Any) -> Mapping[str, Any]:
    """Return an item with an id, if it came without one."""
    fields = item if isinstance(item, dict) else {}
    return {"id": f"in_{response.removeprefix('resp_')}{index:04x}", "type": "message", **fields}


def make_json_response(found: Mapping[str, Any]) -> Response:
    """Encode a body that may be as large as a request's. msgspec takes a tenth of the time that JSONResponse takes."""
    return Response(ENCODER.encode(found), media_type="application/json")


def not_found(name: str) -> ApiError:
    message = f"There is no response {name[:80]!r} here (any more), or it was sent with `store: false`."
    return ApiError(404, message, param="id", code="not_found")
