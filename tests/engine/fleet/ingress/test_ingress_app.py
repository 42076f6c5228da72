"""The ingress over real sockets: answers, retries, limits, keys, and what it tells of all replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from adapters.store.block_keys import chain_keys, compute_root, pack_tokens
from engine.fleet.ingress.open_requests import MOST_REQUESTS
from engine.fleet.ingress.prompt_keys import PromptReader
from engine.fleet.router.route_keys import RouteKeys, RouteRequest
from states.routing.choose_replica import RouteDecision
from tests.engine.fleet.conftest import BLOCK, IDENTITY, FakeFleet, Servers, run_ingress, run_servers
from tests.http.conftest import chat

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 6, "logprobs": True},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 6},
    "/completion": {"prompt": "Hello", "n_predict": 6},
    "/v1/messages": {"messages": HELLO, "max_tokens": 6},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}
CHANGING = {"id", "item_id", "created", "created_at", "completed_at", "timings", "rekindle", "system_fingerprint"}
CHANGING |= {"usage", "tokens_cached", "generation_settings"}  # what was restored, and the seed


def strip_changing(value: Any) -> Any:
    """Leave out what differs between two answers to the same request."""
    if isinstance(value, dict):
        return {name: strip_changing(one) for name, one in value.items() if name not in CHANGING}
    return [strip_changing(one) for one in value] if isinstance(value, list) else value


def say_the_same(fleet: FakeFleet) -> None:
    for site in fleet.sites.values():
        site.say("one two three")


async def read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    return [json.loads(line) if line.startswith("{") else line for line in lines]


async def wait_for_request(fleet: FakeFleet) -> None:
    """Wait until the first server works on a request, and for what it says before the first token."""
    while not fleet.first.door.tickets:  # noqa: ASYNC110 - the fake has no event for it
        await anyio.sleep(0.01)
    await anyio.sleep(0.4)


@pytest.mark.parametrize("path", REQUESTS)
async def test_every_api_answers_as_the_server_does(fleet: FakeFleet, path: str) -> None:
    say_the_same(fleet)
    whole = await fleet.client.post(path, json=REQUESTS[path])
    direct = await fleet.second.client.post(path, json=REQUESTS[path])
    assert whole.headers["x-rekindle-replica"] == "a"
    assert (whole.status_code, strip_changing(whole.json())) == (200, strip_changing(direct.json()))
    streamed = await read_stream(fleet.client, path, REQUESTS[path])
    assert strip_changing(streamed) == strip_changing(await read_stream(fleet.second.client, path, REQUESTS[path]))


async def test_the_router_gets_the_block_keys_of_the_prompt(fleet: FakeFleet) -> None:
    body = {**chat("Hello " * 20, max_tokens=1), "prompt_cache_key": "mine"}
    await fleet.client.post(CHAT, json=body)
    route = fleet.handle.calls[-1]["route"]
    prompt = fleet.first.door.tickets[-1].job.prompt
    assert route.keys == chain_keys(compute_root(IDENTITY, BLOCK), pack_tokens(prompt), BLOCK)
    assert (route.tokens, route.block_size, route.session) == (len(prompt), BLOCK, "mine")


async def test_a_conversation_that_goes_on_is_read_after_its_answer(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = list[int]()  # that had been made when a prompt was read
    read = PromptReader.find_keys

    async def count_reads(*arguments: Any) -> RouteKeys | None:
        choices.append(len(fleet.handle.calls))
        return await read(*arguments)

    monkeypatch.setattr(PromptReader, "find_keys", count_reads)
    messages = chat("Hello " * 40)["messages"]
    for number in range(3):
        await fleet.client.post(CHAT, json={"messages": messages, "max_tokens": 1})
        while len(choices) <= number or fleet.app.finder.waiting_bytes:  # noqa: ASYNC110 - it is read on a thread
            await anyio.sleep(0.01)
        messages = [*messages, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "On."}]
    # The first choice asks for any replica, to know the model. Then the first prompt is read before its own choice.
    assert choices == [1, 3, 4]
    routes = [call["route"] for call in fleet.handle.calls[-3:]]
    assert routes[1].keys == routes[0].keys
    prompt = fleet.first.door.tickets[-2].job.prompt
    assert routes[2].keys == chain_keys(compute_root(IDENTITY, BLOCK), pack_tokens(prompt), BLOCK)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_replica_that_is_gone_fails_no_request(fleet: FakeFleet, streams: bool) -> None:
    fleet.lose_first()
    answer = await fleet.client.post(CHAT, json=chat(max_tokens=4, stream=streams))
    assert (answer.status_code, answer.headers["x-rekindle-replica"]) == (200, "b")
    assert (
        'rekindle_fleet_repeats_total{replica="ingress",reason="lost"} 1.0' in (await fleet.client.get("/metrics")).text
    )


@pytest.mark.parametrize(
    ("path", "more"),
    [*((path, {}) for path in REQUESTS)]
    + [(path, {"stream_options": {"include_usage": True}}) for path in (CHAT, "/v1/completions")],
)
async def test_a_replica_that_dies_before_a_token_fails_no_stream(
    fleet: FakeFleet, path: str, more: dict[str, Any]
) -> None:
    say_the_same(fleet)
    body = {**REQUESTS[path], **more}
    expected = strip_changing(await read_stream(fleet.second.client, path, body))
    fleet.first.door.hang_after = 0
    found: list[Any] = []

    async def read() -> None:
        found.extend(await read_stream(fleet.client, path, body))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        while not fleet.first.door.tickets:  # noqa: ASYNC110 - the fake has no event for it
            await anyio.sleep(0.01)
        await anyio.sleep(0.05)
        fleet.cut_first()
    assert strip_changing(found) == expected


async def test_a_stream_that_has_begun_goes_on_with_one_id(folder: Path) -> None:
    async with run_servers(folder, keepalive_s=0.05) as servers, run_ingress(servers) as fleet:
        fleet.first.door.hang_after = 0
        found: list[Any] = []

        async def read() -> None:
            found.extend(await read_stream(fleet.client, CHAT, chat(max_tokens=4)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await wait_for_request(fleet)
            fleet.cut_first()
        assert len({one["id"] for one in found[:-1]}) == 1
        assert [one["choices"][0]["delta"].get("role") for one in found[:-1]].count("assistant") == 1
        assert found[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_with_progress_goes_on_as_well(fleet: FakeFleet) -> None:
    say_the_same(fleet)
    fleet.first.door.hang_after = 0
    found: list[Any] = []

    async def read() -> None:
        found.extend(await read_stream(fleet.client, CHAT, chat(max_tokens=64, return_progress=True, n=2)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await wait_for_request(fleet)
        fleet.cut_first()
    choices = [choice for one in found[:-1] for choice in one["choices"]]
    for index in range(2):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert "".join(delta.get("content", "") for delta in deltas) == "one two three"
        assert [delta.get("role") for delta in deltas].count("assistant") == 1


async def test_a_stream_that_is_cut_after_a_token_ends_with_an_error(fleet: FakeFleet) -> None:
    say_the_same(fleet)  # two tokens of any other answer may be parts of one character, which has no text yet
    fleet.first.door.hang_after = 2
    found: list[Any] = []
    async with fleet.client.stream("POST", CHAT, json=chat(max_tokens=8, stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
                if any(choice["delta"].get("content") for choice in found[-1].get("choices", ())):
                    fleet.cut_first()
    assert found[-1]["error"]["type"] == "unavailable_error"
    assert not fleet.second.door.tickets


async def test_a_replica_that_stops_or_is_full_hands_over(fleet: FakeFleet) -> None:
    fleet.first.door.state = "draining"
    assert (await fleet.client.post(CHAT, json=chat(max_tokens=1))).headers["x-rekindle-replica"] == "b"
    fleet.first.door.state = "ready"
    fleet.first.door.busy = fleet.first.door.slots
    fleet.first.door.waiting = fleet.first.door.max_queue
    assert (await fleet.client.post(CHAT, json=chat(max_tokens=1))).headers["x-rekindle-replica"] == "b"
    fleet.second.door.busy = fleet.second.door.slots
    fleet.second.door.waiting = fleet.second.door.max_queue
    assert (await fleet.client.post(CHAT, json=chat(max_tokens=1))).status_code == 429


async def test_a_request_waits_for_a_replica_while_there_is_none(fleet: FakeFleet) -> None:
    only = fleet.handle.replicas.pop("b")
    fleet.lose_first()

    async def add() -> None:
        await anyio.sleep(0.2)
        fleet.handle.replicas["b"] = only

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add)
        assert (await fleet.client.post(CHAT, json=chat(max_tokens=1))).headers["x-rekindle-replica"] == "b"


async def test_a_client_that_leaves_cancels_its_request(fleet: FakeFleet) -> None:
    fleet.first.door.hang_after = None
    fleet.first.door.step_s = 0.02
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(fleet.client.post, CHAT, json=chat(max_tokens=1000)))
            while not fleet.first.door.tickets:  # noqa: ASYNC110 - the fake has no event for it
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        while fleet.first.door.tickets[-1].closed is None:  # noqa: ASYNC110 - the fake has no event for it
            await anyio.sleep(0.01)
    closed = fleet.first.door.tickets[-1].closed
    assert closed is not None
    assert closed.finish == "cancelled"
    assert not fleet.app.picker.in_flight


@pytest.mark.parametrize("path", ["/nowhere", "/v1/responses/a/b/c", "/kv/digests"])
async def test_the_paths_that_a_404_lists_are_those_of_the_fleet(fleet: FakeFleet, path: str) -> None:
    refused = await fleet.client.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_path")
    listed = refused.json()["error"]["message"].partition(" It has ")[2].rstrip(".").split(", ")
    assert {"/fleet", "/v1/chat/completions"} <= {*listed}
    assert not any(one.startswith("/kv/") for one in listed)


async def test_a_stored_response_is_found_where_it_is(fleet: FakeFleet) -> None:
    first = (await fleet.client.post("/v1/responses", json=REQUESTS["/v1/responses"])).json()["id"]
    other = (await fleet.second.client.post("/v1/responses", json=REQUESTS["/v1/responses"])).json()["id"]
    for name, holder in ((first, "a"), (other, "b")):
        shown = await fleet.client.get(f"/v1/responses/{name}")
        assert (shown.status_code, shown.headers["x-rekindle-replica"]) == (200, holder)
        more = await fleet.client.post("/v1/responses", json={"input": "more", "previous_response_id": name})
        assert (more.status_code, more.headers["x-rekindle-replica"]) == (200, holder)
    assert (await fleet.client.get(f"/v1/responses/resp_{'0' * 24}")).status_code == 404


async def test_keys_and_hosts_are_checked_before_a_replica_is_asked(folder: Path) -> None:
    keys = {"api_keys": ("secret",)}
    async with run_servers(folder, **keys) as servers, run_ingress(servers, **keys) as fleet:
        assert (await fleet.client.post(CHAT, json=chat())).status_code == 401
        assert (await fleet.client.get("/fleet")).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await fleet.client.get("/props", headers={**key, "host": "evil.example"})).status_code == 421
        assert not fleet.handle.calls
        assert (await fleet.client.post(CHAT, json=chat(max_tokens=1), headers=key)).status_code == 200
        assert len((await fleet.client.get("/fleet", headers=key)).json()["data"]) == 2


async def test_bodies_are_limited_and_errors_are_those_of_the_server(servers: Servers) -> None:
    async with run_ingress(servers, max_body=1000) as fleet:
        assert (await fleet.client.post(CHAT, json=chat("x" * 2000))).status_code == 413
        wrong = await fleet.client.post(CHAT, json={"messages": []})
        direct = await fleet.first.client.post(CHAT, json={"messages": []})
        assert (wrong.status_code, wrong.json()) == (direct.status_code, direct.json())


async def test_health_props_and_metrics_name_each_replica(fleet: FakeFleet) -> None:
    assert (await fleet.client.get("/health")).json() == {"status": "ok", "replicas": {"a": "ok", "b": "ok"}}
    fleet.first.door.state = "draining"
    assert (await fleet.client.get("/health")).json()["status"] == "degraded"
    fleet.second.door.state = "draining"
    assert (await fleet.client.get("/health")).status_code == 503
    listed = (await fleet.client.get("/fleet")).json()["data"]
    assert [(one["id"], one["state"], one["total_slots"]) for one in listed] == [
        ("a", "draining", 4),
        ("b", "draining", 4),
    ]
    metrics = (await fleet.client.get("/metrics")).text
    assert metrics.count("# TYPE rekindle_http_responses_total counter") == 1
    assert 'rekindle_http_responses_total{replica="a",' in metrics


async def test_a_request_may_name_its_replica(fleet: FakeFleet) -> None:
    for more in ({"params": {"replica": "b"}}, {"headers": {"x-rekindle-replica": "b"}}):
        assert (await fleet.client.get("/props", **more)).headers["x-rekindle-replica"] == "b"  # type: ignore[arg-type]
    assert (await fleet.client.get("/props", params={"replica": "z"})).json()["error"]["code"] == "unknown_replica"


async def test_a_fleet_without_replicas_is_unavailable(fleet: FakeFleet) -> None:
    fleet.handle.replicas.clear()
    health = await fleet.client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "unavailable", "replicas": {}})
    assert (await fleet.client.get("/fleet")).json()["data"] == []
    assert "rekindle_fleet_repeats" in (await fleet.client.get("/metrics")).text


async def test_a_fleet_that_stops_ends_its_requests_and_takes_no_more(fleet: FakeFleet) -> None:
    fleet.first.door.step_s = 0.05
    answers: list[httpx.Response] = []
    left: list[int] = []

    async def ask() -> None:
        answers.append(await fleet.client.post(CHAT, json=chat(max_tokens=8)))

    async def drain() -> None:
        left.append(await fleet.app.open_requests.drain(20))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while not fleet.app.open_requests.count:  # noqa: ASYNC110 - the client says nothing
            await anyio.sleep(0.005)
        tasks.start_soon(drain)
        while not fleet.app.open_requests.is_draining:  # noqa: ASYNC110
            await anyio.sleep(0.005)
        refused = await fleet.client.post(CHAT, json=chat(max_tokens=1))
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "The server is shutting down.")
        assert (await fleet.client.get("/health")).status_code == 200
        assert not left
    assert answers[0].json()["usage"]["completion_tokens"] == 8
    assert left == [0]


async def test_a_fleet_that_stops_waits_only_so_long(fleet: FakeFleet) -> None:
    fleet.first.door.hang_after = 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(fleet.client.post, CHAT, json=chat(max_tokens=8)))
        while not fleet.app.open_requests.count:  # noqa: ASYNC110 - the client says nothing
            await anyio.sleep(0.005)
        assert await fleet.app.open_requests.drain(0.05) == 1
        tasks.cancel_scope.cancel()


async def test_a_fleet_without_requests_stops_at_once(fleet: FakeFleet) -> None:
    async with fleet.client.stream("GET", "/events") as events:
        await anext(events.aiter_lines())
        assert await fleet.app.open_requests.drain(20) == 0, "a stream of events has no end"


async def test_a_router_in_this_process_is_asked_before_the_handle(fleet: FakeFleet) -> None:
    facts = fleet.handle.replicas["b"].to_metadata()
    asked = list[RouteRequest]()

    class Router:
        def choose_offered(self, given: RouteRequest) -> tuple[RouteDecision, Mapping[str, Any]] | None:
            asked.append(given)
            return None if "b" in given.avoid else (RouteDecision("b", "prefix", (0, 0, 0, 0), 0, 0, 0, 0), facts)

    fleet.app.picker.routers.router = Router()
    answer = await fleet.client.post(CHAT, json=chat(max_tokens=2))
    assert (answer.status_code, answer.headers["x-rekindle-replica"]) == (200, "b")
    assert answer.headers["content-length"] == str(len(answer.content))
    assert not fleet.handle.calls
    assert isinstance(asked[-1].route, RouteKeys)
    fleet.app.picker.shun("b")
    other = await fleet.client.post(CHAT, json=chat(max_tokens=2))
    assert other.headers["x-rekindle-replica"] == "a", "a router without a replica leaves the choice to the handle"


async def test_an_ingress_answers_only_so_many_requests_at_once(fleet: FakeFleet) -> None:
    fleet.app.open_requests.count = MOST_REQUESTS
    refused = await fleet.client.post(CHAT, json=chat(max_tokens=2))
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    fleet.app.open_requests.count = 0
    assert (await fleet.client.post(CHAT, json=chat(max_tokens=2))).status_code == 200
