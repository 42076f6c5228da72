"""Sessions of coding agents go on: with a picture in a tool's result, a compaction, and another process in the middle.

The clients themselves are tried by hand; these are requests of the shapes that they send, with texts of our own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.shapes import (
    DATA_URL,
    IMAGE,
    MORE,
    SESSIONS,
    SHORTER,
    SUMMARY,
    URL_PART,
    ClientSession,
    Item,
    codex_says,
    text,
)
from tests.http.conftest import Site, served
from tests.text import small

IDS = [session.name for session in SESSIONS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("small"))


@asynccontextmanager
async def running(model: Path, kept: Path) -> AsyncIterator[Site]:
    """A server with what an earlier one has left in `kept`."""
    folders = {"kept": kept / "responses", "turns": kept / "turns"}
    async with served(model, any_model=True, max_ctx=100_000, **folders) as site:
        site.say("It is done.")
        yield site


async def asked(site: Site, session: ClientSession, body: dict[str, Any]) -> tuple[str, str]:
    """The prompt that the engine saw, and the answer as it came. The answer has to be whole."""
    response = await site.post(session.path, body, headers={**session.headers})
    assert response.status_code == 200, response.text
    prompt = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)
    return prompt, answer_of(response.text, session, streamed=bool(body.get("stream")))


def answer_of(said: str, session: ClientSession, *, streamed: bool) -> str:
    if not streamed:
        return "".join(block["text"] for block in json.loads(said)["content"])
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert not any("error" in event or event.get("type") in {"error", "response.failed"} for event in events), said
    if session.path.startswith("/v1/messages"):
        assert events[-1]["type"] == "message_stop"
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    if session.path == "/v1/responses":
        assert events[-1]["type"] == "response.completed"
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said.rstrip().endswith("data: [DONE]")
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("session", SESSIONS, ids=IDS)
async def test_a_session_goes_on_with_a_picture_a_compaction_and_another_server(
    session: ClientSession, model: Path, tmp_path: Path
) -> None:
    for folder in ("responses", "turns"):
        (tmp_path / folder).mkdir(mode=0o700)
    halves = session.bodies[: session.compaction], session.bodies[session.compaction :]
    for bodies in halves:  # each by a server of its own
        async with running(model, tmp_path) as site:
            for body in bodies:
                _, answer = await asked(site, session, body)
                assert answer.strip() == "It is done."


@pytest.mark.parametrize("session", SESSIONS, ids=IDS)
async def test_a_picture_is_told_as_left_out_and_the_rest_is_read(
    session: ClientSession, model: Path, tmp_path: Path
) -> None:
    for folder in ("responses", "turns"):
        (tmp_path / folder).mkdir(mode=0o700)
    async with running(model, tmp_path) as site:
        first, turn, shorter = [(await asked(site, session, body))[0] for body in session.bodies[:3]]
        last, _ = await asked(site, session, session.bodies[-1])
    for prompt in (first, turn, shorter):
        assert prompt.count("image left out") == 1
        assert IMAGE not in prompt
    assert MORE in turn
    assert SHORTER in shorter
    assert SUMMARY in last
    assert "image left out" not in last
    assert last.rindex("<tool_response>") < last.rindex("4")


def typed_picture(session: ClientSession) -> Item:
    """A picture that the user shows, as the client writes it."""
    if session.path == "/v1/responses":
        shown = codex_says("user", "What is this?", number=7)
        return {**shown, "content": [{"type": "input_image", "image_url": DATA_URL}, *shown["content"]]}
    source = {"type": "base64", "data": IMAGE, "media_type": "image/png"}
    part = {"type": "image", "source": source} if session.path.startswith("/v1/messages") else URL_PART
    return {"role": "user", "content": [part, text("What is this?")]}


@pytest.mark.parametrize("session", SESSIONS, ids=IDS)
async def test_a_picture_that_the_user_shows_is_refused_once_and_the_next_turn_goes_on(
    session: ClientSession, model: Path, tmp_path: Path
) -> None:
    for folder in ("responses", "turns"):
        (tmp_path / folder).mkdir(mode=0o700)
    name = "input" if session.path == "/v1/responses" else "messages"
    said, shown = session.bodies[-1][name], typed_picture(session)
    answered, more = session.bodies[1][name][-2:]
    async with running(model, tmp_path) as site:
        body = {**session.bodies[-1], name: [*said, answered, shown]}
        refused = await site.post(session.path, body, headers={**session.headers})
        assert refused.status_code == 400
        assert "text only" in refused.text
        body = {**session.bodies[-1], name: [*said, answered, shown, more]}
        prompt, answer = await asked(site, session, body)
    assert answer.strip() == "It is done."
    assert prompt.count("image left out") == 1
    assert "What is this?" in prompt
