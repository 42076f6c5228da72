"""The page's files, and the stream of events behind it, as HTTP: what a browser does with them is in tests/page."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from adapters.http.page import events, files
from tests.http.conftest import Site, served

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_a_browser_gets_the_page_and_a_program_json_at_the_same_path(shared: Site) -> None:
    for path in ("/", "", "/?x=1"):
        page = await shared.client.get(path, headers=HTML)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.text.startswith("<!doctype html>")
    for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        answer = await shared.client.get("/", headers=headers)
        assert answer.json()["status"] == "ok"
        assert "/events" in answer.json()["endpoints"]
        assert not [path for path in answer.json()["endpoints"] if path.startswith("/page")]
        assert answer.json()["endpoints"].count("/v1/responses/{id}") == 1, "one path, whatever its methods are"
        assert answer.headers["vary"] == page.headers["vary"] == "Accept"
    assert (await shared.client.post("/", headers=HTML)).status_code == 405


async def test_every_file_comes_with_its_type_and_may_load_nothing_from_elsewhere(shared: Site) -> None:
    for path, file in files.load_files().items():
        answer = await shared.client.get(path)
        assert answer.content == file.body
        assert answer.headers["content-type"] == files.TYPES[Path(path).suffix or ".html"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}


def test_the_files_name_nothing_elsewhere_and_have_nothing_inline() -> None:
    for path, file in files.load_files().items():
        text = file.body.decode()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
    page = files.load_files()[files.PAGE].body.decode()
    assert not re.findall(r"<style|\sstyle=|\son\w+=", page)
    assert not re.findall(r"<script(?! (type=\"module\" )?src=)", page)
    named = {f"/{one}" for one in re.findall(r'(?:src|href)="(page/[^"]+)"', page)}
    assert named <= files.load_files().keys()


async def test_a_file_that_is_known_is_not_sent_again(shared: Site) -> None:
    first = await shared.client.get("/page/app.js")
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await shared.client.get("/page/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert again.headers["content-security-policy"] == files.POLICY
    assert (await shared.client.get("/page/app.js", headers={"if-none-match": '"other"'})).status_code == 200
    assert (await shared.client.get("/page/api.js")).headers["etag"] != etag
    head = await shared.client.head("/", headers=HTML)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(files.load_files()[files.PAGE].body)


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/../app.py", "/page/%2e%2e/files.py", "/page/app.js/x"])
async def test_there_is_nothing_else_below_the_page(shared: Site, path: str) -> None:
    answer = await shared.client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_path"
    assert "/page" not in answer.json()["error"]["message"].partition("This server has")[2]


async def test_where_there_are_keys_the_page_is_for_everybody_and_what_it_shows_is_not(folder: Path) -> None:
    async with served(folder, api_keys=("right",)) as site:
        assert (await site.client.get("/", headers=HTML)).status_code == 200
        assert {(await site.client.get(path)).status_code for path in files.load_files()} == {200}
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = await site.client.get("/events", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await site.client.get("/", headers=headers)).status_code == 401
        assert (await site.client.post("/", headers=HTML)).status_code == 401
        rebound = await site.client.get("/", headers={**HTML, "host": "evil.example"})
        assert rebound.status_code == 421
        async with listening(site, authorization="Bearer right") as heard:
            assert (await heard())["state"] == "ready"


@asynccontextmanager
async def listening(site: Site, **headers: str) -> AsyncIterator[Any]:
    """Yield a function that returns the data of the next event."""
    async with site.client.stream("GET", "/events", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.aiter_lines()

        async def heard() -> dict[str, Any]:
            kind = ""
            with anyio.fail_after(60):
                async for line in lines:
                    if line.startswith("event: "):
                        kind = line[7:]
                    elif line.startswith("data: "):
                        assert kind == "status"
                        shown: dict[str, Any] = json.loads(line[6:])
                        return shown
            raise EOFError

        yield heard


async def test_the_stream_begins_with_what_props_shows_and_goes_on_with_what_changes(site: Site) -> None:
    async with listening(site) as heard:
        assert await heard() == (await site.client.get("/props")).json()
        site.door.troubles = {"disk": "no room"}
        assert await heard() == {"troubles": {"disk": "no room"}}
        site.door.troubles = {}
        assert await heard() == {"troubles": {}}
        # a later client gets everything, too
        async with listening(site) as later:
            assert (await later())["troubles"] == {}


async def test_while_nothing_changes_only_comments_come(folder: Path) -> None:
    async with served(folder, keepalive_s=0.01) as site, site.client.stream("GET", "/events") as response:
        lines = [line async for line in head_of(response, 7) if line]
    assert lines[0] == "event: status"
    assert set(lines[2:]) == {events.COMMENT.decode().strip()}


async def head_of(response: httpx.Response, count: int) -> AsyncIterator[str]:
    lines = response.aiter_lines()
    for _ in range(count):
        yield await anext(lines)


async def test_nothing_looks_while_nobody_listens(site: Site) -> None:
    looked = 0
    status = site.door.status

    def counted() -> Any:
        nonlocal looked
        looked += 1
        return status()

    site.door.status = counted  # type: ignore[method-assign]
    try:
        async with listening(site) as heard:
            await heard()
        with anyio.fail_after(60):
            while listeners(site):  # noqa: ASYNC110 - the server announces no closed connections
                await anyio.sleep(0.01)
        seen = looked
        await anyio.sleep(3 * events.CHECK_INTERVAL_S)
        assert looked == seen
    finally:
        del site.door.status  # type: ignore[method-assign]


def listeners(site: Site) -> float:
    count = site.metrics.registry.get_sample_value("rekindle_status_listeners")
    assert count is not None
    return count


async def test_so_many_listen_and_no_more_until_one_leaves(site: Site) -> None:
    async with anyio.create_task_group() as tasks:

        async def listen(*, task_status: Any) -> None:
            with anyio.CancelScope() as scope:
                async with listening(site) as heard:
                    await heard()
                    task_status.started(scope)
                    await anyio.sleep_forever()

        scopes = [await tasks.start(listen) for _ in range(events.MAX_LISTENERS)]
        refused = await site.client.get("/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_listeners")
        assert int(refused.headers["retry-after"]) > 0
        scopes[0].cancel()
        with anyio.fail_after(60):
            while listeners(site) == events.MAX_LISTENERS:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.01)
        async with listening(site) as heard:
            assert (await heard())["state"] == "ready"
        tasks.cancel_scope.cancel()


async def test_a_stream_ends_at_once_when_the_server_stops(folder: Path) -> None:
    async with served(folder, keepalive_s=1000) as site, listening(site) as heard:
        await heard()
        site.serving.stop()
        with pytest.raises(EOFError):
            await heard()
        with anyio.fail_after(60):
            await site.serving.end_event.wait()


async def test_who_does_not_read_is_dropped_and_nothing_is_kept_for_him(folder: Path) -> None:
    async with served(folder, write_timeout_s=0.2) as site:
        async with await anyio.connect_tcp("127.0.0.1", site.serving.port) as deaf:
            await deaf.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await deaf.receive(1)
            with anyio.fail_after(60):
                while listeners(site):
                    site.door.troubles = {"large": "x" * 4_000_000 + str(anyio.current_time())}
                    await anyio.sleep(0.02)
        assert listeners(site) == 0
