"""Streams, cancellation, deadlines, full queues, slow readers, shutdown."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
from attrs import evolve
from starlette.types import Message, Send

from adapters.http.answer.answer_shape import COMMENT
from adapters.http.answer.job_stream import (
    ENGINE_GRACE_S,
    AnswerDelta,
    FinishedChoice,
    PromptProgress,
    RunningJobs,
    run_jobs,
)
from adapters.http.answer.reply import Alarm, Reply
from adapters.http.edge_options import EdgeTimes
from adapters.http.request.plan_jobs import PlannedJob
from effects.job import Job
from tests.http.conftest import Site, chat, served
from tests.http.sse import chunks, events, stream, text_of

PATH = "/v1/chat/completions"


async def until(condition: Callable[[], object], seconds: float = 30) -> float:
    """Wait for it; returns how long it took."""
    start = time.monotonic()
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await anyio.sleep(0.005)
    return time.monotonic() - start


def raw_post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


async def read_on(connection: anyio.abc.SocketStream) -> None:
    while True:
        await connection.receive()


async def stop_once_started(site: Site) -> None:
    await until(lambda: site.door.tickets and site.door.tickets[0].report.completion_tokens > 2)
    site.serving.stop(now=True)


SLOW = {"prefill": {"chunk_s": 0.05, "chunk": 1}, "decode": {"step_s": 0.05}, "queue": {"slots": 0}}


@pytest.mark.parametrize("phase", SLOW)
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_is_noticed_at_once_wherever_its_job_is(
    folder: Path, phase: str, streamed: bool
) -> None:
    async with served(folder, door=SLOW[phase]) as site:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(site.post, PATH, chat(stream=streamed, max_tokens=500)))
            await until(lambda: site.door.tickets)
            await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        (ticket,) = site.door.tickets
        await until(lambda: ticket.closed, 20)  # the answer would take 25 s
        assert ticket.closed is not None
        assert (ticket.reason, ticket.closed.finish) == ("client_gone", "cancelled")
        assert site.door.busy == site.door.waiting == 0


async def test_a_client_that_half_closes_its_connection_has_left(folder: Path) -> None:
    async with served(folder, door={"step_s": 0.05}) as site:
        request = raw_post(chat(stream=True))
        async with await anyio.connect_tcp("127.0.0.1", site.serving.port) as connection:
            await connection.send(request)
            await until(lambda: site.door.tickets)
            await connection.send_eof()
            await until(lambda: site.door.tickets[0].reason)
        assert site.door.tickets[0].reason == "client_gone"


async def test_all_choices_of_a_request_are_cancelled_together(folder: Path) -> None:
    async with served(folder, door={"step_s": 0.05}) as site:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(site.chat, n=3))
            await until(lambda: len(site.door.tickets) == 3)
            tasks.cancel_scope.cancel()
        await until(lambda: all(ticket.closed for ticket in site.door.tickets))
        assert {ticket.reason for ticket in site.door.tickets} == {"client_gone"}


async def test_a_client_that_does_not_read_is_given_up_and_others_go_on(folder: Path) -> None:
    async with served(folder, door={"per_step": 50, "step_s": 0.001}, write_timeout_s=0.5, max_ctx=1 << 20) as site:
        request = raw_post(chat(stream=True, logprobs=True, top_logprobs=20))
        async with await anyio.connect_tcp("127.0.0.1", site.serving.port) as connection:
            await connection.send(request)
            await until(lambda: site.door.tickets and site.door.tickets[0].reason)
            assert site.door.tickets[0].reason == "client_gone"
            assert (await site.chat(max_tokens=1)).status_code == 200
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await read_on(connection)  # what was on its way, then the end


async def test_a_full_queue_is_a_429_with_retry_after_streamed_or_not(folder: Path) -> None:
    async with served(folder, door={"slots": 0, "max_queue": 0}) as site:
        seen = site.door.status()
        site.door.status = lambda: evolve(seen, queue_full=False)  # the edge learns it from the ticket
        for streamed in (True, False):
            response = await site.post(PATH, chat(stream=streamed))
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "queue_full"


async def test_one_of_several_choices_that_finds_no_place_takes_the_others_with_it(folder: Path) -> None:
    async with served(folder, door={"slots": 1, "max_queue": 1, "step_s": 0.01}) as site:
        response = await site.chat(n=4)
        assert response.status_code == 429
        await until(lambda: all(ticket.closed for ticket in site.door.tickets))


async def test_a_flood_is_queued_up_to_the_limit_and_the_rest_is_told_quickly(folder: Path) -> None:
    async with served(folder, door={"slots": 4, "max_queue": 32, "step_s": 0.02}) as site:
        after: dict[int, list[float]] = {200: [], 429: []}

        async def one() -> None:
            async with await anyio.connect_tcp("127.0.0.1", site.serving.port) as connection:
                start = time.monotonic()
                await connection.send(raw_post(chat(max_tokens=5)))
                after[int((await connection.receive())[9:12])].append(time.monotonic() - start)

        async with anyio.create_task_group() as tasks:
            for _ in range(250):
                tasks.start_soon(one)
        answered, refused = sorted(after[200]), sorted(after[429])
        assert len(answered) >= 36
        assert len(answered) + len(refused) == 250
        assert refused[len(refused) // 2] < answered[-1], "who is refused does not wait for those in the queue"
        assert (await site.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_past_its_deadline_is_a_504_or_an_error_event(folder: Path, streamed: bool) -> None:
    async with served(folder, door={"step_s": 0.05}, request_timeout_s=0.3) as site:
        if streamed:
            _, found = await stream(site, PATH, chat())
            assert json.loads(found[-1])["error"]["code"] == "deadline_exceeded"
        else:
            response = await site.chat()
            assert response.status_code == 504
            assert response.headers["x-should-retry"] == "false"
        assert site.door.tickets[0].reason == "deadline"


async def test_a_deadline_holds_even_if_the_engine_says_nothing_any_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ENGINE_GRACE_S > 1
    monkeypatch.setattr("adapters.http.answer.job_stream.ENGINE_GRACE_S", 0.2)
    async with served(folder, door={"hang_after": 2}, request_timeout_s=0.2) as site:
        assert (await site.chat()).status_code == 504


async def test_a_failed_job_is_a_500_that_keeps_the_details_for_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(folder, door={"fail_after": 0}) as site:
        with caplog.at_level(logging.INFO, "rekindle.http"):
            response = await site.chat()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert sum("secret detail" in record.getMessage() for record in caplog.records) == 1
        site.door.fail_after = None
        assert (await site.chat(max_tokens=1)).status_code == 200


async def test_a_bug_in_the_edge_is_a_500_and_the_server_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(folder) as site:
        submit = site.door.submit
        site.door.submit = lambda _: 1 / 0
        response = await site.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "ZeroDivision" not in response.text
        assert sum("a bug in the HTTP edge" in record.getMessage() for record in caplog.records) == 1
        site.door.submit = submit
        assert (await site.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_a_long_prefill_is_kept_alive_by_comments_and_by_events(folder: Path, path: str) -> None:
    async with served(folder, door={"go": anyio.Event()}, keepalive_s=0.05) as site:
        site.say("ok")
        found, beats = list[str](), list[int]()
        async with site.client.stream("POST", path, json={**chat(), "prompt": "x", "stream": True}) as response:
            async for event in events(response):
                if event.startswith(":"):
                    beats.append(len(found))
                found.append(event)
                if len(beats) == 3 and not event.startswith(":"):
                    site.door.go.set()
        assert len(beats) >= 3
        for index in beats:
            (choice,) = json.loads(found[index + 1])["choices"]
            assert choice["finish_reason"] is None
            assert not choice.get("delta")
            assert not choice.get("text")
        said = [json.loads(event) for event in found[:-1] if not event.startswith(":")]
        assert text_of(said) == "ok"


@pytest.mark.parametrize(("since", "beats"), [(6.0, 1), (0.0, 0), (None, 0)])
async def test_no_sign_of_life_follows_what_was_sent_since_it_was_rung_for(since: float | None, beats: int) -> None:
    """The end, for one, behind which nothing may come. None: something is being sent."""
    reply, sent = object.__new__(Reply), list[Message]()
    reply.shape = SimpleNamespace(stream_heartbeat=lambda: (COMMENT,))  # type: ignore[assignment]

    async def send(message: Message) -> None:
        sent.append(message)

    quiet = Alarm(5.0, lambda: None, None if since is None else time.monotonic() - since)
    await reply._keep_alive(quiet, send)
    assert len(sent) == beats


async def test_progress_comes_while_the_prompt_is_computed(folder: Path) -> None:
    async with served(folder, door={"chunk_s": 0.05}) as site:
        body = chat("some words " * 20, return_progress=True, stream=True, max_tokens=1)
        unfinished = set[int]()
        async with site.client.stream("POST", PATH, json=body) as response:
            async for event in events(response):
                if "prompt_progress" in event:
                    seen = json.loads(event)["prompt_progress"]
                    assert 0 <= seen["processed"] <= seen["total"]
                    assert seen["time_ms"] >= 0
                    if seen["processed"] < seen["total"]:
                        unfinished.add(seen["processed"])
        assert len(unfinished) > 3


async def test_what_has_come_meanwhile_is_one_event_and_an_end_comes_alone(site: Site) -> None:
    job = Job((1, 2, 3), 50, stop_tokens=tuple(site.text.tokenizer.end_tokens))
    site.say("Hello there")
    with run_jobs(site.door, (PlannedJob(0, 0, job, ()),), site.text.tokenizer, site.options) as jobs:
        await until(lambda: site.door.tickets[0].closed)
        *before, said = await jobs.next_events()
        (ended,) = await jobs.next_events()
        assert await jobs.next_events() == ()
    assert all(isinstance(event, PromptProgress) for event in before)
    assert isinstance(said, AnswerDelta)
    assert (said.text, isinstance(ended, FinishedChoice) and ended.outcome.finish) == ("Hello there", "stop")


async def test_what_the_engine_has_said_in_time_is_told_however_late_it_is_read(site: Site) -> None:
    """This happens where a client reads nothing until the deadline has passed."""
    job = Job((1, 2, 3), 50, stop_tokens=tuple(site.text.tokenizer.end_tokens))
    site.say("Hello there")
    with run_jobs(site.door, (PlannedJob(0, 0, job, ()),), site.text.tokenizer, site.options) as jobs:
        await until(lambda: site.door.tickets[0].closed)
        jobs._cancel_expired()  # noqa: SLF001 - as the timer of the deadline does
        jobs._end_overdue()  # noqa: SLF001 - as the one behind it does
        *_, said = await jobs.next_events()
        (ended,) = await jobs.next_events()
    assert isinstance(said, AnswerDelta)
    assert (said.text, isinstance(ended, FinishedChoice) and ended.outcome.finish) == ("Hello there", "stop")


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_leaves_nothing_to_the_collector(site: Site, streamed: bool) -> None:
    """A collection holds up all answers while it looks through all objects."""

    async def ask(body: dict[str, Any]) -> None:
        assert (await site.client.post(PATH, json=body)).status_code == 200

    await ask(chat(stream=streamed))  # what is made once is there
    ours = {Alarm, Job, RunningJobs, PlannedJob, Reply}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await ask(chat(stream=streamed, max_tokens=5))
        await anyio.sleep(0.05)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not {type(one) for one in gc.garbage} & ours
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class SaidLater(Reply):
    """Something at once, and something more while a sign of life waits for the client."""

    async def _answer(self, run: RunningJobs, scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start"})
        await self.shape.is_waiting.wait()  # type: ignore[attr-defined]
        await send({"type": "http.response.body"})


async def test_a_client_is_given_up_by_the_first_thing_that_it_does_not_take(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign of life waits for it, and then what is said, too: that is no second chance."""
    reply, waiting, starts = object.__new__(SaidLater), list[Message](), list[int]()
    reply.door, reply.planned_jobs, reply.tokenizer, reply.finish_reason = site.door, (), site.text.tokenizer, ""
    is_waiting = anyio.Event()
    reply.shape = SimpleNamespace(stream_heartbeat=lambda: (COMMENT,), is_waiting=is_waiting)  # type: ignore[assignment]
    reply.options = evolve(site.options, times=EdgeTimes(keepalive_s=0.1, write_timeout_s=1.0))

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            waiting.append(message)
            is_waiting.set()
            await anyio.sleep(60)

    restart = Alarm.restart

    def note_start(alarm: Alarm) -> None:
        restart(alarm)
        if alarm.seconds == reply.options.times.write_timeout_s:
            starts.append(len(waiting))

    monkeypatch.setattr(Alarm, "restart", note_start)
    await reply._run({}, partial(anyio.sleep, 60), send)
    assert reply.finish_reason == "client_stalled"
    assert len(waiting) == 2
    assert starts == [0, 0], "its time has begun with the status line and with the sign of life, and not again"


async def test_equal_request_ids_do_not_mix_answers(shared: Site) -> None:
    answers: dict[int, str] = {}

    async def one(seed: int) -> None:
        headers = {"x-request-id": "same"}
        body = await shared.post(PATH, chat(seed=seed, max_tokens=8), headers=headers)
        answers[seed] = body.json()["choices"][0]["message"]["content"]

    async with anyio.create_task_group() as tasks:
        for seed in range(8):
            tasks.start_soon(one, seed)
    for seed in range(8):
        again = await shared.chat(seed=seed, max_tokens=8)
        assert again.json()["choices"][0]["message"]["content"] == answers[seed]
    assert len(set(answers.values())) > 1


@pytest.mark.timeout(90)
async def test_a_very_long_prompt_does_not_hold_up_other_streams(folder: Path) -> None:
    async with served(folder, max_ctx=1 << 22, door={"step_s": 0.01}) as site:
        heard = 0

        async def listen() -> None:
            nonlocal heard
            async with site.client.stream("POST", PATH, json=chat(stream=True, max_tokens=2000)) as response:
                async for event in events(response):
                    heard += '"content":"' in event

        content = json.dumps(chat("The quick brown fox " * 30_000, max_tokens=1)).encode()  # 600 kB in one line
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            tasks.start_soon(listen)
            await until(lambda: heard > 20)
            before = heard
            response = await site.client.post(PATH, content=content, headers={"content-type": "application/json"})
            meanwhile = heard - before
            tasks.cancel_scope.cancel()
        assert response.json()["usage"]["prompt_tokens"] > 60_000
        assert meanwhile > 10, "reading the body alone leaves time for fewer"


async def test_a_stream_that_was_accepted_ends_with_an_error_when_the_engine_shuts_down(folder: Path) -> None:
    async with served(folder, door={"step_s": 0.02}) as site:
        async with site.client.stream("POST", PATH, json=chat(stream=True)) as response:
            found = []
            async for event in events(response):
                found.append(event)
                if len(found) == 3:
                    site.door.state = "draining"
                    site.door.tickets[0].cancel("shutdown")
        assert json.loads(found[-1])["error"]["code"] == "unavailable"
        refused = await site.chat()
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


async def test_a_stopped_server_lets_open_streams_finish_and_takes_no_more(folder: Path) -> None:
    async with served(folder, door={"step_s": 0.02}) as site:
        async with site.client.stream("POST", PATH, json=chat(stream=True, max_tokens=20)) as response:
            found = []
            async for event in events(response):
                found.append(event)
                if len(found) == 2:
                    site.serving.stop()
        assert found[-1] == "[DONE]"
        with pytest.raises(httpx.ConnectError):
            await site.client.get("/health")


async def test_a_server_told_to_stop_now_drops_its_streams(folder: Path) -> None:
    async with served(folder, door={"step_s": 0.05}, server={"grace_s": 60}) as site:
        start = time.monotonic()
        site.door.tasks.start_soon(stop_once_started, site)
        with pytest.raises(httpx.HTTPError):
            await stream(site, PATH, chat())
        assert time.monotonic() - start < 30
        await until(lambda: site.door.tickets[0].reason == "client_gone")


async def test_a_port_that_is_taken_is_an_os_error(folder: Path) -> None:
    from adapters.http.wire.server import serve_app  # noqa: PLC0415

    async with served(folder) as site:
        with pytest.raises(OSError, match="in use"):
            await serve_app(lambda *_: None, "127.0.0.1", site.serving.port, on_listening=lambda _: None)


async def test_every_request_is_one_line_in_the_log_without_its_texts(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rekindle.http"):
        await site.chat("SECRET prompt", max_tokens=1)
        await site.chat("SECRET prompt", n=0)
        await site.client.get("/no%0asuch%1b[31m")
        await site.client.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "rekindle.http"]
    assert [line.split()[:3] for line in lines] == [
        ["POST", PATH, "200"],
        ["POST", PATH, "400"],
        ["GET", "other", "404"],
    ]
    assert "chatcmpl-" in lines[0]
    assert " length jobs=1" in lines[0]
    assert not any("SECRET" in line or "\x1b" in line for line in lines)


async def test_health_tells_of_a_thread_in_trouble(folder: Path) -> None:
    async with served(folder) as site:
        assert (await site.client.get("/health")).json() == {"status": "ok"}
        site.door.troubles = {"trace": "No space left on device"}
        response = await site.client.get("/health")
        assert (response.status_code, response.json()) == (200, {"status": "degraded", "troubles": site.door.troubles})


async def test_health_and_requests_say_that_a_shard_is_gone(folder: Path) -> None:
    async with served(folder) as site:
        site.door.outages = {"shard tcp://10.0.0.2:7461": "Connection refused"}
        said = (
            "A part of the model is out of reach, so nothing can be answered now: "
            "shard tcp://10.0.0.2:7461: Connection refused."
        )
        health = await site.client.get("/health")
        assert (health.status_code, health.headers["retry-after"]) == (503, "1")
        assert health.json() == {
            "status": "unavailable",
            "troubles": site.door.outages,
            "error": {"message": said, "type": "unavailable_error", "param": None, "code": 503},
        }
        site.door.fail_after, site.door.failure = 0, "lost"
        response = await site.chat()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"] == {
            "message": said,
            "type": "unavailable_error",
            "param": None,
            "code": "shard_lost",
        }
        site.door.outages = {}  # it is there again meanwhile
        again = await site.chat()
        assert (again.status_code, "retry-after" in again.headers) == (503, True)
        site.door.reset()
        site.say("ok")
        assert (await site.chat()).status_code == 200
        assert (await site.client.get("/health")).json() == {"status": "ok"}


async def test_small_answers_are_not_held_up_in_the_socket(shared: Site) -> None:
    for _ in range(500):
        start = time.monotonic()
        assert (await shared.client.get("/health")).status_code == 200
        if time.monotonic() - start < 0.03:  # 40 ms, each of them, with Nagle's algorithm and delayed acknowledgements
            return
    raise AssertionError("all of them are")


async def test_nothing_is_left_open_after_many_requests(folder: Path) -> None:
    async with served(folder) as site:
        site.say("ok")

        def descriptors() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        async def some(count: int) -> None:
            for _ in range(count):
                await site.chat()
                await chunks(site, PATH, chat())
                await site.chat(n=0)

        await some(5)
        before = descriptors()
        await some(30)
        assert descriptors() <= before + 2
        assert all(ticket.closed for ticket in site.door.tickets)
