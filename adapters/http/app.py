"""The server's routes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import anyio
from attrs import asdict, define, field
from attrs.filters import exclude
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.http.answer.access_log import CALLER
from adapters.http.answer.answer_shape import new_id
from adapters.http.answer.cache_misses import MissLog
from adapters.http.answer.job_stream import Ended
from adapters.http.answer.reply import Reply
from adapters.http.apis import openai_chat
from adapters.http.apis.api import Api, Counter
from adapters.http.apis.openai_stored_responses import KeptResponses
from adapters.http.apis.registry import COUNTERS, STATELESS, TEMPLATE, answer_error
from adapters.http.edge_options import EdgeOptions
from adapters.http.guard import Guard
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.frozen_messages import FrozenMessages
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.history.response_store import Archive
from adapters.http.page import files
from adapters.http.page.events import Listener, Watch
from adapters.http.request import controls
from adapters.http.request import served_models as models
from adapters.http.request.answer_grammar import held
from adapters.http.request.asked import Asked, Asker
from adapters.http.request.compression import Sessions
from adapters.http.request.render_prompt import rendered
from adapters.http.request.sampling_fields import default_settings
from adapters.http.wire.body_budget import ROOM, Intake
from adapters.http.wire.errors import (
    SHUTTING_DOWN,
    ApiError,
    invalid,
    left,
    no_such_path,
    out_of_reach,
    queue_full,
    unavailable,
    wrong_method,
)
from adapters.http.wire.fields import Fields
from adapters.http.wire.read_body import reading
from adapters.http.wire.retry_after import Preparing, Turnover
from adapters.metrics import Metrics
from adapters.text.model_text import Text
from adapters.text.template import text_of
from adapters.text.tokenizer import GaveUp, TooLong
from effects.ports import Door

log = logging.getLogger("rekindle.http")
MOST_TOKENIZED = 1 << 20  # tokens that /tokenize gives: 0.5 s of work, 8 MB of answer


def build_app(
    door: Door,
    text: Text,
    options: EdgeOptions,
    metrics: Metrics,
    archive: Archive | None = None,
    *,
    memory: TurnMemory | None = None,
    frozen: FrozenMessages | None = None,
    recall: HistoryLoader | None = None,
) -> Starlette:
    """The whole server as an ASGI application. Its lifespan ends what `text` started.

    archive, memory: of responses, and of the tokens of answers; None: they end with the process.  frozen: what aged
    messages were frozen to; None: they are not.  recall: what reads these; None: they are as they are.
    """
    archive, memory = Archive() if archive is None else archive, TurnMemory() if memory is None else memory
    edge = Edge(door, text, options, metrics, archive, memory, frozen)
    metrics.watch_turns(memory.figures)
    metrics.watch_listeners(lambda: edge.watch.listeners)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await text.aclose()

    routes = edge.routes()
    shown = sorted(f"{' or '.join(sorted((route.methods or set()) - {'HEAD'}))} {route.path}" for route in routes)
    routes += files.routes()
    paths = frozenset(route.path for route in routes)

    async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
        """Unknown paths and wrong methods."""
        assert isinstance(error, HTTPException)
        path, allowed = request.scope["path"], (error.headers or {}).get("Allow", "")
        if error.status_code == 405:
            return await answer_error(request, wrong_method(request.method, path, allowed))
        return await answer_error(request, no_such_path(path, shown))

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, options=options, metrics=metrics, paths=paths, recall=recall)],
        exception_handlers={ApiError: answer_error, HTTPException: answer_http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


@define(eq=False)
class Edge:
    """The handlers and what they share."""

    door: Door
    text: Text
    options: EdgeOptions
    metrics: Metrics
    archive: Archive
    memory: TurnMemory
    frozen: FrozenMessages | None
    turnover: Turnover = field(factory=Turnover)
    missed: MissLog = field(factory=MissLog)
    sessions: Sessions = field(factory=Sessions)
    preparing: Preparing = field(init=False)
    intake: Intake = field(init=False)
    kept: KeptResponses = field(init=False)
    watch: Watch = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.preparing = Preparing(self.options.max_jobs)
        self.kept = KeptResponses(self.archive, self.options)
        self.watch = Watch(self._told, self.options)
        self.intake = Intake(ROOM * self.options.max_body, self.options.retry_after_s)

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            *(Route(api.path, partial(self.generate, api), methods=post) for api in STATELESS),
            *(Route(counter.path, partial(self.count, counter), methods=post) for counter in COUNTERS),
            *self.kept.routes(self.generate, self.count),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route(TEMPLATE, self.apply_template, methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{model:path}", self.model, methods=get),
            Route("/health", self.health, methods=get),
            Route("/props", self.props, methods=get),
            Route("/slots", self.slots, methods=get),
            Route("/events", self.events, methods=get),
            Route("/debug/misses", self.misses, methods=get),
            Route("/metrics", self.render_metrics, methods=get),
            Route("/", self.root, methods=get),
        ]

    # -- generating text

    async def generate(self, api: Api, request: Request) -> Reply:
        async with self._ready(request) as fields:
            with self.preparing.one(self._retry_after):
                asked = await api.read(fields, self.options, self.text, self._asker(request))
        # its body takes no room any more while it waits in another line
        asked = await self._held(asked, request)
        owner = request.scope.get(CALLER, "")
        how = controls.kept_apart(asked.controls, owner)
        tokenizer = self.text.tokenizer
        planned = controls.plan(
            asked.prompts,
            asked.paths,
            how,
            self.options,
            self.text.openings,
            reader=asked.reader,
            cuts=asked.cuts,
            opens=asked.opens,
            messages=asked.messages,
            turn=asked.turn,
            stabilized=asked.stabilized,
            tail=asked.tail,
            tools=asked.tools,
            sessions=self.sessions,
            frozen=self.frozen,
        )
        self.memory.count(0 if asked.turn is None else asked.turn.remembered)
        shape = api.shape(new_id(api.prefix), asked, self.options, tokenizer)
        told = how.stream, how.progress, self.turnover, partial(self._ended, owner), asked.headers
        return Reply(self.door, planned, shape, api.dialect, self.options, tokenizer, *told)

    def _ended(self, owner: str, name: str, ended: Ended) -> None:
        self.missed.note(owner, name, ended)
        report = ended.closed.report
        if report.compression is not None and not report.compression.why_not:
            self.sessions.heard(ended.planned.session, report.accepted, report.proposed)

    def _asker(self, request: Request) -> Asker:
        return Asker(request.is_disconnected, self.memory, request.scope.get(CALLER, ""))

    async def _held(self, asked: Asked, request: Request) -> Asked:
        async def gone() -> bool:
            return self.door.get_acceptance() == "draining" or await request.is_disconnected()

        try:
            return await held(asked, self.text, self.options, gone, request.scope.get(CALLER, ""))
        except GaveUp:
            if self.door.get_acceptance() != "draining":
                raise left() from None
            raise unavailable(SHUTTING_DOWN, self.options.retry_after_s) from None

    @asynccontextmanager
    async def _ready(self, request: Request) -> AsyncIterator[Fields]:
        """The body, unless nothing can be generated now anyway."""
        takes = self.door.get_acceptance()
        if takes == "draining":
            raise unavailable(SHUTTING_DOWN, self.options.retry_after_s)
        if takes == "queue_full":
            raise queue_full(self._retry_after())
        async with self._reading(request) as fields:
            yield fields

    def _retry_after(self) -> int:
        return self.turnover.retry_after(self.door.status())

    def _reading(self, request: Request) -> AbstractAsyncContextManager[Fields]:
        return reading(request, self.options, self.intake)

    # -- text without a model

    async def count(self, counter: Counter, request: Request) -> JSONResponse:
        async with self._reading(request) as fields:
            tokens = await counter.read(fields, self.options, self.text, self._asker(request))
        return JSONResponse(counter.shape(len(tokens)))

    async def tokenize(self, request: Request) -> JSONResponse:
        async with self._reading(request) as fields:
            content = fields.text("content")
            if content is None:
                raise fields.wrong("content", "a string")
            special, start = fields.flag("parse_special"), fields.flag("add_special")
            most = max(MOST_TOKENIZED, self.options.counted)
            try:
                (tokens,) = await self.text.tokenizer.encode(
                    [content], controls=special, start=start, most=most, gone=request.is_disconnected
                )
            except TooLong:
                raise invalid("$.content", f"has more than {most} tokens; send it in parts") from None
            except GaveUp:
                raise left() from None
            if not fields.flag("with_pieces"):
                return JSONResponse({"tokens": tokens})
            return JSONResponse({"tokens": [{"id": token, "piece": self._piece(token)} for token in tokens]})

    def _piece(self, token: int) -> str | list[int]:
        raw = self.text.tokenizer.piece(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    async def detokenize(self, request: Request) -> JSONResponse:
        async with self._reading(request) as fields:
            listed = fields.items("tokens", self.options.max_body)
            if listed is None:
                raise fields.wrong("tokens", "an array of token ids")
            tokens = controls.check_tokens(listed, fields.at("tokens"), self.options)
            content = await anyio.to_thread.run_sync(lambda: self.text.tokenizer.decode(tokens, special=True))
            return JSONResponse({"content": content})

    async def apply_template(self, request: Request) -> JSONResponse:
        async with self._reading(request) as fields:
            conversation = await anyio.to_thread.run_sync(openai_chat.read_conversation, fields, self.text)
            turns = self._asker(request).turns(controls.read_salt(fields))
            parts = await rendered(conversation, fields, self.text, self.options, turns)
            return JSONResponse({"prompt": text_of(parts)})

    # -- about the server

    async def models(self, _: Request) -> JSONResponse:
        return JSONResponse(models.listed(self.options))

    async def model(self, request: Request) -> JSONResponse:
        name = models.check_name(request.path_params["model"], self.options)
        return JSONResponse(models.described(name, self.options))

    async def health(self, _: Request) -> JSONResponse:
        status = self.door.status()
        troubles = dict(status.troubles)
        retry = {"retry-after": str(self.options.retry_after_s)}
        described = {"message": SHUTTING_DOWN, "type": "unavailable_error", "param": None, "code": 503}
        if status.state != "ready":
            return JSONResponse({"status": status.state, "error": described}, 503, retry)
        if status.outages:
            described["message"] = out_of_reach(status.outages, "", self.options.retry_after_s).message
            return JSONResponse({"status": "unavailable", "troubles": troubles, "error": described}, 503, retry)
        # Answers are right in spite of any other trouble, so a balancer goes on sending requests.
        return JSONResponse({"status": "degraded", "troubles": troubles} if troubles else {"status": "ok"})

    async def props(self, _: Request) -> JSONResponse:
        return JSONResponse(self._told())

    def _told(self) -> dict[str, Any]:
        options, status = self.options, self.door.status()
        template = self.text.template
        return {
            "default_generation_settings": default_settings(options),
            "model_alias": options.model_id,
            "chat_template": template.source if template is not None else None,
            "tool_parser": self.text.calls,
            "reasoning_parser": self.text.reasoning,
            "reasoning_efforts": dict(self.text.efforts),
            "eos_tokens": list(self.text.tokenizer.end_tokens),
            "build_info": f"rekindle {options.version}",
            "numerics": dict(options.numerics),
            "total_slots": len(status.slots),
            **status.props,
            **asdict(status, filter=exclude("props")),
            **asdict(self.door.activity()),
        }

    async def events(self, _: Request) -> Listener:
        """What /props shows, as it changes."""
        return self.watch.join()

    async def slots(self, request: Request) -> JSONResponse:
        status = self.door.status()
        if request.query_params.get("fail_on_no_slot") == "1" and status.slots_busy == len(status.slots):
            raise unavailable("No slot is free.", self.turnover.retry_after(status))
        return JSONResponse(list(map(asdict, status.slots)))

    async def misses(self, request: Request) -> JSONResponse:
        """The caller's own."""
        return JSONResponse({"object": "list", "data": self.missed.of(request.scope.get(CALLER, ""))})

    async def render_metrics(self, _: Request) -> Response:
        body, kind = self.metrics.render()
        return Response(body, headers={"content-type": kind})

    async def root(self, _: Request) -> JSONResponse:
        """For programs: a browser gets the page."""
        state = self.door.status().state
        about: dict[str, Any] = {"status": "ok" if state == "ready" else state, "model": self.options.model_id}
        about |= {"version": self.options.version, "endpoints": sorted(route.path for route in self.routes())}
        return JSONResponse(about, headers={"vary": "Accept"})
