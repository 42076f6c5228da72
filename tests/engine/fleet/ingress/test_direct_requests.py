"""Requests reach the ingress before Ray Serve's own layer, which gets what only it answers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.fleet.application import INGRESS_ENVIRONMENT
from engine.fleet.ingress.direct_requests import DIRECT, SLOT, DirectRequests, IngressSlot
from engine.fleet.ingress.held_answer import HeldAnswer

pytestmark = pytest.mark.timeout(20)


class CalledApp:
    """An application that notes the scopes it was called with."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)


async def call(app: DirectRequests, **scope: Any) -> None:
    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        raise AssertionError(f"nothing is sent: {message}")

    await app({"type": "http", "path": "/", **scope}, receive, send)


async def test_requests_go_to_the_ingress_and_the_paths_of_serve_to_serve() -> None:
    serve, ingress, slot = CalledApp(), CalledApp(), IngressSlot()
    slot.app = ingress
    app = DirectRequests(serve, slot)
    for path in ("/", "/v1/chat/completions", "/-", "/-prefix"):
        await call(app, path=path)
    for path in ("/-/healthz", "/-/routes"):
        await call(app, path=path)
    await call(app, type="websocket")
    assert [scope["path"] for scope in ingress.scopes] == ["/", "/v1/chat/completions", "/-", "/-prefix"]
    assert all(scope[DIRECT] for scope in ingress.scopes)
    assert [scope["path"] for scope in serve.scopes] == ["/-/healthz", "/-/routes", "/"]
    assert not any(DIRECT in scope for scope in serve.scopes)


async def test_serve_answers_until_there_is_an_ingress() -> None:
    serve = CalledApp()
    await call(DirectRequests(serve, IngressSlot()), path="/v1/models")
    assert [scope["path"] for scope in serve.scopes] == ["/v1/models"]


async def test_serve_finds_the_middleware_by_the_path_that_an_ingress_gets() -> None:
    module, _, name = INGRESS_ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
    (middleware,) = getattr(importlib.import_module(module), name)()
    built = middleware.cls(CalledApp(), *middleware.args, **middleware.kwargs)
    assert isinstance(built, DirectRequests)
    assert built.slot is SLOT


@pytest.mark.parametrize("names_itself", [False, True])
async def test_a_direct_answer_has_the_id_of_its_replica_and_a_whole_one_its_length(names_itself: bool) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    answer = HeldAnswer(send, can_repeat=True, names_itself=names_itself)
    await answer.begin(200, [(b"content-type", b"application/json"), (b"x-request-id", b"chatcmpl-1")])
    await answer.add(b'{"id":')
    await answer.add(b'"chatcmpl-1"}')
    await answer.finish()
    headers = dict(sent[0]["headers"])
    assert headers.get(b"x-request-id") == (b"chatcmpl-1" if names_itself else None)
    assert headers[b"content-length"] == b"19"
    assert b"".join(message["body"] for message in sent[1:]) == b'{"id":"chatcmpl-1"}'
