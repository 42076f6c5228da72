"""The server's routes, and what their handlers share."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
from attrs import asdict, define, evolve, field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.http.answer.access_log import CALLER, NOTE, describe_refusal
from adapters.http.answer.answer_shape import make_id
from adapters.http.answer.cache_misses import MissLog
from adapters.http.answer.job_stream import FinishedChoice
from adapters.http.answer.reply import Reply
from adapters.http.answer.server_status import collect_props, make_health
from adapters.http.apis import openai_chat
from adapters.http.apis.api import Api, TokenCounter
from adapters.http.apis.openai_responses import PATH as RESPONSES
from adapters.http.apis.openai_responses import make_responses_api
from adapters.http.apis.openai_stored_responses import StoredResponses
from adapters.http.apis.registry import COUNTERS, STATELESS, TEMPLATE, make_error_response
from adapters.http.edge_options import EdgeOptions
from adapters.http.guard import Guard
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.frozen_messages import FrozenMessages
from adapters.http.history.histories import Histories
from adapters.http.history.response_store import ResponseStore
from adapters.http.page import files
from adapters.http.page.events import Listener, PropsWatch
from adapters.http.request import controls
from adapters.http.request import served_models as models
from adapters.http.request.answer_grammar import compile_answer_grammar
from adapters.http.request.compression import CompressionSessions
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.request.plan_jobs import JobPlanner, PlannedJob
from adapters.http.request.render_prompt import render_text
from adapters.http.wire.body_budget import BUDGETED_BODIES, BodyBudget
from adapters.http.wire.errors import (
    SHUTTING_DOWN,
    ApiError,
    client_gone,
    invalid,
    queue_full,
    unavailable,
    unknown_path,
    wrong_method,
)
from adapters.http.wire.fields import Fields
from adapters.http.wire.read_body import read_request_fields
from adapters.http.wire.retry_after import PreparationLimit, SlotTime
from adapters.metrics import Metrics
from adapters.text.model_text import Text
from adapters.text.template import join_rendered
from adapters.text.tokenizer import ClientLeft, TooManyTokens
from effects.ports import Door

D = TypeVar("D")
log = logging.getLogger("rekindle.http")
MAX_TOKENIZED = 1 << 20  # tokens that /tokenize returns: 0.5 s of work, 8 MB of answer


def build_app(
    door: Door,
    text: Text,
    options: EdgeOptions,
    metrics: Metrics,
    histories: Histories | None = None,
    *,
    fleet_routes: Callable[[Edge], Sequence[Route]] = lambda _: (),
) -> Starlette:
    """Return the whole server as an ASGI application. Its lifespan ends what `text` started.

    histories: None for empty ones. fleet_routes: makes the routes that only a fleet around it uses.
    """
    kept = Histories() if histories is None else histories
    edge = Edge(door, text, options, metrics, kept.responses, kept.turns, kept.frozen_messages)
    metrics.watch_turns(kept.turns.count_figures)
    metrics.watch_listeners(lambda: edge.props_watch.listener_count)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await text.aclose()

    routes = edge.make_routes()
    shown = sorted(f"{' or '.join(sorted((route.methods or set()) - {'HEAD'}))} {route.path}" for route in routes)
    routes += [*files.make_routes(), *fleet_routes(edge)]
    paths = frozenset(route.path for route in routes)

    async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
        """Answer a request for an unknown path, or with a wrong method."""
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        allowed = (error.headers or {}).get("Allow", "")
        if error.status_code == 405:
            return await answer_error(request, wrong_method(request.method, path, allowed))
        return await answer_error(request, unknown_path(path, shown))

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, access=options.access, metrics=metrics, paths=paths, history_loader=kept.loader)],
        exception_handlers={ApiError: answer_error, HTTPException: answer_http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


@define(eq=False)
class Edge:
    """The handlers of all routes, and the objects that they share."""

    door: Door
    text: Text
    options: EdgeOptions
    metrics: Metrics
    responses: ResponseStore
    turn_memory: TurnMemory
    frozen_messages: FrozenMessages | None
    slot_time: SlotTime = field(factory=SlotTime)
    miss_log: MissLog = field(factory=MissLog)
    sessions: CompressionSessions = field(factory=CompressionSessions)
    preparation_limit: PreparationLimit = field(init=False)
    body_budget: BodyBudget = field(init=False)
    stored_responses: StoredResponses = field(init=False)
    props_watch: PropsWatch = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.preparation_limit = PreparationLimit(self.options.limits.max_jobs)
        self.stored_responses = StoredResponses(self.responses, self.options)
        self.props_watch = PropsWatch(self._collect_props, self.options.times)
        self.body_budget = BodyBudget(BUDGETED_BODIES * self.options.limits.max_body, self.options.times.retry_after_s)

    def make_routes(self) -> list[Route]:
        get = ["GET"]
        post = ["POST"]
        return [
            *(Route(api.path, partial(self.generate, api), methods=post) for api in STATELESS),
            *(Route(counter.path, partial(self.count_tokens, counter), methods=post) for counter in COUNTERS),
            *self.stored_responses.make_routes(self.generate, self.count_tokens),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route(TEMPLATE, self.apply_template, methods=post),
            Route("/v1/models", self.list_models, methods=get),
            Route("/v1/models/{model:path}", self.show_model, methods=get),
            Route("/health", self.show_health, methods=get),
            Route("/props", self.show_props, methods=get),
            Route("/slots", self.list_slots, methods=get),
            Route("/events", self.stream_events, methods=get),
            Route("/debug/misses", self.list_misses, methods=get),
            Route("/metrics", self.render_metrics, methods=get),
            Route("/", self.show_server, methods=get),
        ]

    # -- generating text

    def find_api(self, path: str, request: Request) -> Api[Any] | None:
        """Return the API for generating text at a path, for the caller of a request; None if there is none."""
        if path == RESPONSES:
            return make_responses_api(self.stored_responses.find_folder(request))
        return next((api for api in STATELESS if api.path == path), None)

    async def parse_request(self, api: Api[D], request: Request) -> ParsedRequest[D]:
        """Return what a request says. Raises ApiError."""
        async with self._read_if_accepting(request) as fields:
            with self.preparation_limit.admit(self._retry_after):
                return await api.read(fields, self.options, self.text, self._identify_caller(request))

    def plan_jobs(self, parsed: ParsedRequest[Any], owner: str) -> tuple[PlannedJob, ...]:
        """Return the jobs of a request. Only its caller finds what is kept of them. owner: a name for the caller's key.
        Raises ApiError.
        """
        owned = evolve(parsed, controls=controls.separate_by_owner(parsed.controls, owner))
        return JobPlanner(self.options, self.text.openings, self.sessions, self.frozen_messages).plan_jobs(owned)

    async def generate(self, api: Api[Any], request: Request) -> Reply:
        # The body takes no room in the budget any more while the request waits for a grammar.
        parsed = await self._compile_grammar(await self.parse_request(api, request), request)
        owner = request.scope.get(CALLER, "")
        planned_jobs = self.plan_jobs(parsed, owner)
        turn = parsed.pending_turn
        self.turn_memory.count_prompt(0 if turn is None else turn.remembered_tokens)
        return Reply(
            door=self.door,
            planned_jobs=planned_jobs,
            shape=api.make_shape(make_id(api.id_prefix), parsed, self.options, self.text.tokenizer),
            error_format=api.error_format,
            options=self.options,
            tokenizer=self.text.tokenizer,
            stream=parsed.controls.stream,
            shows_progress=parsed.controls.shows_progress,
            slot_time=self.slot_time,
            on_choice_end=partial(self._record_choice, owner),
            headers=parsed.headers,
        )

    def _record_choice(self, owner: str, name: str, ended: FinishedChoice) -> None:
        self.miss_log.record(owner, name, ended)
        report = ended.outcome.report
        if report.compression is not None and not report.compression.why_not:
            self.sessions.record_acceptance(ended.planned_job.session, report.accepted, report.proposed)

    def _identify_caller(self, request: Request) -> ApiClient:
        return ApiClient(request.is_disconnected, self.turn_memory, request.scope.get(CALLER, ""))

    async def _compile_grammar(self, parsed: ParsedRequest[D], request: Request) -> ParsedRequest[D]:
        async def has_left() -> bool:
            return self.door.get_acceptance() == "draining" or await request.is_disconnected()

        try:
            return await compile_answer_grammar(
                parsed, self.text, self.options, has_left, request.scope.get(CALLER, "")
            )
        except ClientLeft:
            if self.door.get_acceptance() != "draining":
                raise client_gone() from None
            raise unavailable(SHUTTING_DOWN, self.options.times.retry_after_s) from None

    @asynccontextmanager
    async def _read_if_accepting(self, request: Request) -> AsyncIterator[Fields]:
        """Read the body, unless nothing can be generated now. Raises ApiError 429 or 503 then."""
        takes = self.door.get_acceptance()
        if takes == "draining":
            raise unavailable(SHUTTING_DOWN, self.options.times.retry_after_s)
        if takes == "queue_full":
            raise queue_full(self._retry_after())
        async with self._read_fields(request) as fields:
            yield fields

    def _retry_after(self) -> int:
        return self.slot_time.estimate_retry_after(self.door.status())

    def _read_fields(self, request: Request) -> AbstractAsyncContextManager[Fields]:
        return read_request_fields(request, self.options, self.body_budget)

    # -- text without a model

    async def count_tokens(self, counter: TokenCounter, request: Request) -> JSONResponse:
        async with self._read_fields(request) as fields:
            tokens = await counter.read(fields, self.options, self.text, self._identify_caller(request))
        return JSONResponse(counter.make_body(len(tokens)))

    async def tokenize(self, request: Request) -> JSONResponse:
        async with self._read_fields(request) as fields:
            content = fields.text("content")
            if content is None:
                raise fields.wrong_value("content", "a string")
            special = fields.flag("parse_special")
            start = fields.flag("add_special")
            most = max(MAX_TOKENIZED, self.options.max_counted_tokens)
            try:
                (tokens,) = await self.text.tokenizer.encode(
                    [content], controls=special, start=start, max_tokens=most, is_disconnected=request.is_disconnected
                )
            except TooManyTokens:
                raise invalid("$.content", f"has more than {most} tokens; send it in parts") from None
            except ClientLeft:
                raise client_gone() from None
            if not fields.flag("with_pieces"):
                return JSONResponse({"tokens": tokens})
            return JSONResponse({"tokens": [{"id": token, "piece": self._spell_token(token)} for token in tokens]})

    def _spell_token(self, token: int) -> str | list[int]:
        raw = self.text.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    async def detokenize(self, request: Request) -> JSONResponse:
        async with self._read_fields(request) as fields:
            listed = fields.items("tokens", self.options.limits.max_body)
            if listed is None:
                raise fields.wrong_value("tokens", "an array of token ids")
            tokens = controls.check_tokens(listed, fields.path_of("tokens"), self.options.model)
            content = await anyio.to_thread.run_sync(lambda: self.text.tokenizer.decode(tokens, special=True))
            return JSONResponse({"content": content})

    async def apply_template(self, request: Request) -> JSONResponse:
        async with self._read_fields(request) as fields:
            conversation = await anyio.to_thread.run_sync(openai_chat.read_conversation, fields, self.text)
            turns = self._identify_caller(request).find_turns(controls.read_salt(fields))
            return JSONResponse(
                {"prompt": join_rendered(await render_text(conversation, fields, self.text, self.options, turns))}
            )

    # -- about the server

    async def list_models(self, _: Request) -> JSONResponse:
        return JSONResponse(models.list_models(self.options.model))

    async def show_model(self, request: Request) -> JSONResponse:
        name = models.check_name(request.path_params["model"], self.options.model)
        return JSONResponse(models.describe_model(name, self.options.model))

    async def show_health(self, _: Request) -> JSONResponse:
        return make_health(self.door.status(), self.options.times.retry_after_s)

    async def show_props(self, _: Request) -> JSONResponse:
        return JSONResponse(self._collect_props())

    def _collect_props(self) -> dict[str, Any]:
        return collect_props(self.door, self.text, self.options)

    async def stream_events(self, _: Request) -> Listener:
        """Stream what /props shows, as it changes."""
        return self.props_watch.make_listener()

    async def list_slots(self, request: Request) -> JSONResponse:
        status = self.door.status()
        if request.query_params.get("fail_on_no_slot") == "1" and status.slots_busy == status.total_slots:
            raise unavailable("No slot is free.", self.slot_time.estimate_retry_after(status))
        return JSONResponse(list(map(asdict, status.slots)))

    async def list_misses(self, request: Request) -> JSONResponse:
        """List the caller's own cache misses."""
        return JSONResponse({"object": "list", "data": self.miss_log.list_misses(request.scope.get(CALLER, ""))})

    async def render_metrics(self, _: Request) -> Response:
        body, kind = self.metrics.render()
        return Response(body, headers={"content-type": kind})

    async def show_server(self, _: Request) -> JSONResponse:
        """Tell a program what this server is. A browser gets the page instead."""
        state = self.door.status().state
        about: dict[str, Any] = {"status": "ok" if state == "ready" else state, "model": self.options.model.model_id}
        about |= {
            "version": self.options.model.version,
            "endpoints": sorted({route.path for route in self.make_routes()}),
        }
        return JSONResponse(about, headers={"vary": "Accept"})


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    request.scope[NOTE] = describe_refusal(error)
    return make_error_response(request.scope, error)
