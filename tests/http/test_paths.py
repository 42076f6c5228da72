"""Tests of paths as clients write them, of the names of a model, and of answers where there is nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters.http.apis.registry import make_error_response
from adapters.http.wire.error_format import make_anthropic_error
from adapters.http.wire.errors import context_exceeded, unavailable
from adapters.http.wire.paths import canonical_path
from adapters.http.wire.retry_after import SlotTime, compute_retry_after
from effects.job import Report
from effects.ports import Closed
from tests.http.conftest import Site, chat, served
from tests.http.sse import chunks

KNOWN = {"/", "/v1/chat/completions", "/v1/models", "/health"}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/chat/completions///", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/models/a/b/", "/v1/models/a/b"),
        ("/v1/models/a", "/v1/models/a"),
        ("/v1/health", "/health"),
        ("", "/"),
        ("///", "/"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/v2/models", "/v2/models"),
        ("//health", "//health"),
        ("/v1/v1/models", "/v1/models"),
        ("/health/../props", "/health/../props"),
    ],
)
def test_a_path_is_meant_with_or_without_its_version_and_slashes(path: str, meant: str) -> None:
    assert canonical_path(path, KNOWN) == meant
    assert canonical_path(meant, KNOWN) == meant


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/chat/completions/"])
async def test_a_chat_works_without_v1_and_with_slashes(shared: Site, path: str) -> None:
    assert (await shared.post(path, chat(max_tokens=1))).json()["object"] == "chat.completion"


async def test_the_other_paths_do_too(shared: Site) -> None:
    assert (await shared.post("/completions/", {"prompt": "x", "max_tokens": 1})).status_code == 200
    assert (await shared.post("/v1/tokenize", {"content": "x"})).status_code == 200
    listed = (await shared.client.get("/v1/models")).json()
    for path in ("/v1/models/", "/models", "/models/"):
        assert (await shared.client.get(path)).json() == listed
    for path in ("/models/small", "/v1/models/small/"):
        assert (await shared.client.get(path)).json() == listed["data"][0]


async def test_an_unknown_path_is_told_with_those_that_exist(shared: Site) -> None:
    for method, path in (("POST", "/v1/embeddings"), ("GET", "/v1/assistants/5"), ("POST", "/api/generate")):
        response = await shared.client.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "unknown_path")
        assert path in error["message"]
        assert "whatever the model" in error["message"]
        for known in ("POST /v1/chat/completions", "GET /v1/models", "GET /health"):
            assert known in error["message"]


@pytest.mark.parametrize("path", ["/v1/complete", "/v1/models/other", "/v1/messages/batches/x"])
async def test_anthropics_clients_are_known_by_their_header_and_get_errors_of_their_shape(
    shared: Site, path: str
) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    response = await shared.client.get(f"{path}?beta=true", headers=headers)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert set(body["error"]) == {"type", "message"}
    host = await shared.client.post(path, json={}, headers={**headers, "host": "evil.example"})
    assert (host.status_code, host.json()["error"]["type"]) == (421, "invalid_request_error")
    plain = await shared.client.get("/v1/models/other")
    assert set(plain.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/messages", 529), ("/messages/", 529), ("/v1/messages/x", 529), ("/v1/responses", 503)]
)
def test_a_server_that_loads_says_so_in_the_dialect_of_the_path(path: str, status: int) -> None:
    response = make_error_response({"type": "http", "path": path, "headers": []}, unavailable("Loading model", 1))
    assert (response.status_code, response.headers["retry-after"]) == (status, "1")
    assert (json.loads(bytes(response.body)).get("type") == "error") == (status == 529)


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/batches/x"])
async def test_below_anthropics_path_errors_are_anthropics(shared: Site, path: str) -> None:
    response = await shared.client.post(f"{path}?beta=true", json={"model": "claude"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert "POST /v1/chat/completions" in response.json()["error"]["message"]


def test_anthropics_words_for_a_prompt_that_is_too_long_have_both_counts() -> None:
    for tokens, said in ((5000, 5000), (4096, 4097), (0, 4097)):
        error = make_anthropic_error(context_exceeded(tokens, 4096, "$.messages"))["error"]
        assert error == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {said} tokens > 4096 maximum",
        }


async def test_a_wrong_method_is_told_with_the_right_one(shared: Site) -> None:
    response = await shared.client.get("/v1/chat/completions/")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "POST is" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
async def named(folder: Path) -> AsyncIterator[Site]:
    async with served(folder, aliases=("gpt-4o", "a/b", "small")) as site:
        yield site


async def test_a_model_is_served_by_each_of_its_names_and_answers_by_the_one_that_was_asked(named: Site) -> None:
    for name in ("small", "gpt-4o", "a/b"):
        assert (await named.chat(model=name, max_tokens=1)).json()["model"] == name
        assert (await named.complete(model=name, max_tokens=1)).json()["model"] == name
        assert {chunk["model"] for chunk in await chunks(named, "/v1/chat/completions", chat(model=name))} == {name}
        assert (await named.client.get(f"/v1/models/{name}")).json()["id"] == name
    assert (await named.chat(max_tokens=1)).json()["model"] == "small"
    listed = (await named.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["small", "gpt-4o", "a/b"]
    assert {model["root"] for model in listed["data"]} == {"small"}
    assert (listed["first_id"], listed["last_id"]) == ("small", "a/b")
    refused = await named.chat(model="gpt-5")
    assert refused.status_code == 404
    for name in ("gpt-5", "small", "gpt-4o", "a/b", "--alias", "--any-model"):
        assert name in refused.json()["error"]["message"]


async def test_any_model_may_be_asked_for_where_any_is_allowed(folder: Path) -> None:
    async with served(folder, any_model=True) as site:
        assert (await site.chat(model="gpt-5", max_tokens=1)).json()["model"] == "gpt-5"
        assert (await site.client.get("/v1/models/what/ever")).json()["id"] == "what/ever"
        assert [model["id"] for model in (await site.client.get("/models")).json()["data"]] == ["small"]


async def test_the_log_tells_why_and_how_fast(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.say("a b c d e f")
    with caplog.at_level(logging.INFO, "rekindle.http"):
        await site.chat("SECRET", temperature=9)
        await site.chat("SECRET", prefix_cache={"SECRET\n": 1})
        await site.post("/v1/SECRET%1b", {})
        await site.chat("SECRET", model="SECRET")
        await chunks(site, "/v1/chat/completions", chat("Hello"))
        await site.chat("Hello")
    lines = [record.getMessage() for record in caplog.records if record.name == "rekindle.http"]
    assert len(lines) == 6
    assert lines[0].endswith(" refused code=invalid_request_error field=$.temperature")
    assert " field=$.prefix_cache" in lines[1]
    assert "path='/v1/SECRET\\x1b' refused code=unknown_path" in lines[2]
    assert lines[3].endswith(" refused code=model_not_found field=$.model")
    for line in lines[4:]:
        assert " stop jobs=1 prompt=" in line
        assert " first=0." in line
        assert line.endswith("tok/s")
    assert "cached=0" in lines[4]
    assert "cached=0" not in lines[5]
    assert not any("SECRET" in line or "\x1b" in line for line in (*lines[:2], *lines[3:]))


@pytest.mark.parametrize(
    ("waiting", "slots", "seconds", "expected"),
    [
        (0, 4, 0.0, 1),
        (0, 4, 2.0, 1),
        (0, 1, 2.0, 2),
        (7, 4, 10.0, 20),
        (7, 4, 10.1, 21),
        (64, 4, 30.0, 60),
        (10**9, 1, 10**9, 60),
        (0, 0, 5.0, 5),
    ],
)
def test_when_to_come_again_follows_the_queue(waiting: int, slots: int, seconds: float, expected: int) -> None:
    assert compute_retry_after(waiting, slots, seconds) == expected


def test_how_long_requests_take_is_a_mean_that_forgets_and_waiting_does_not_count() -> None:
    pace = SlotTime()
    pace.add(Closed("stop", Report(1), "", {"Waiting": 60_000, "Prefilling": 1000, "Speculating": 3000}))
    assert pace.mean_s == 4
    for _ in range(30):
        pace.add(Closed("stop", Report(1), "", {"Speculating": 1000}))
    assert pace.mean_s == pytest.approx(1, rel=0.01)


async def test_a_full_queue_says_when_to_come_again(folder: Path) -> None:
    async with served(folder, door={"slots": 1, "max_queue": 0, "step_s": 0.15}) as site:
        site.say("a b c d e f g h i j")
        assert (await site.chat()).status_code == 200
        site.door.busy = 1
        refused = await site.chat()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 2
