"""Tests of compression as requests ask for it, of the jobs that follow, and of what sessions learn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from adapters.http.answer.usage import describe_compression
from adapters.http.edge_options import CompressionDefaults
from adapters.http.request.compression import (
    FIRST_KEEP,
    LEAST_KEEP,
    MAX_SESSIONS,
    MOST_KEEP,
    CompressionSessions,
    SessionRatio,
    adapt_ratio,
    interpolate_keep,
    split_prompt,
)
from adapters.text.conversation import ChatMessage
from effects.compression import Compressed, Compression
from effects.job import Report
from tests.http.conftest import Site, chat, served

DEFAULTS = CompressionDefaults("auto", 300, 100, max_scored_tokens=8000)
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = "\n".join(f"Line {at} says that {at * 37 % 101} is a number." for at in range(200))


@pytest.fixture(scope="module")
async def drafting(folder: Path) -> AsyncIterator[Site]:
    """A server with a drafter, as far as it knows: its context holds 4,096 tokens, 8,000 can be scored."""
    async with served(folder, compression=DEFAULTS) as site:
        yield site


async def compression(site: Site, content: str = "Hello", **fields: Any) -> Compression:
    before = len(site.door.tickets)
    response = await site.chat(content, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    found = site.door.tickets[before].job.compression
    return evolve(found, parts=())


async def test_without_a_drafter_a_job_says_nothing_of_compression(shared: Site) -> None:
    await shared.chat("Hello", max_tokens=1)
    assert shared.door.tickets[-1].job.compression == Compression("off", 32_000, 50)
    assert (await shared.chat("Hello", max_tokens=1)).json()["rekindle"]["compression"] is None


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, Compression("auto", 300, 100)),
        ({"mode": "off"}, Compression("off", 300, 100)),
        ({"mode": "always", "threshold": 7}, Compression("always", 7, 100)),
        ({"keep_ratio": 0.25}, Compression("auto", 300, 250)),
        ({"keep_ratio": 1}, Compression("auto", 300, 1000)),
    ],
)
async def test_a_request_may_say_otherwise(drafting: Site, asked: dict[str, Any], wanted: Compression) -> None:
    assert await compression(drafting, compression=asked) == wanted


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (7, "$.compression", "must be an object"),
        ({"mode": "never"}, "$.compression.mode", "one of 'off', 'auto', 'always'"),
        ({"mode": True}, "$.compression.mode", "not true"),
        ({"threshold": -1}, "$.compression.threshold", "an integer from 0"),
        ({"threshold": 1 << 22}, "$.compression.threshold", "an integer from 0"),
        ({"keep_ratio": 0}, "$.compression.keep_ratio", "a number in [0.001, 1]"),
        ({"keep_ratio": 1.5}, "$.compression.keep_ratio", "a number in [0.001, 1]"),
        ({"keep_ratio": "half"}, "$.compression.keep_ratio", 'not "half"'),
        ({"session": 7}, "$.compression.session", "a string"),
        ({"session": "s" * 201}, "$.compression.session", "at most 200 characters"),
        ({"keep": 0.5}, "$.compression", "accepted are mode, threshold, keep_ratio, session, freeze"),
    ],
)
async def test_every_wrong_value_is_named(drafting: Site, asked: Any, param: str, words: str) -> None:
    response = await drafting.chat("Hello", compression=asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


async def test_a_server_without_a_drafter_says_so(shared: Site) -> None:
    response = await shared.chat("Hello", compression={"mode": "always"})
    assert response.json()["error"]["param"] == "$.compression.mode"
    assert "--prefill-drafter" in response.json()["error"]["message"]
    assert (await shared.chat("Hello", max_tokens=1, compression={"mode": "off"})).status_code == 200


async def test_what_goes_on_and_what_has_tools_is_told_to_the_gate(drafting: Site) -> None:
    assert (await compression(drafting, tools=[TOOL])).tools
    assert (await compression(drafting, tools=[TOOL], tool_choice="none")).tools, "they are in the prompt all the same"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, chat("?")["messages"][0]]
    assert (await compression(drafting, messages=messages)).continues
    first = await compression(drafting)
    assert not first.continues
    assert not first.tools


async def test_a_job_says_who_speaks_where_and_keeps_the_question(drafting: Site) -> None:
    messages = [{"role": "system", "content": LONG[:900]}, {"role": "user", "content": "Which line?"}]
    await drafting.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    job = drafting.door.tickets[-1].job
    shown = [(part.role, part.protected) for part in job.compression.parts]
    assert shown == [("system", False), ("user", True), ("assistant", False)]
    for part, words in zip(job.compression.parts, ("Line 0", "Which line?", ""), strict=True):
        assert words in drafting.text.tokenizer.decode(job.prompt[part.start : part.stop])
    assert job.compression.parts[-1].stop == len(job.prompt)


def test_messages_that_cannot_be_told_apart_have_no_names() -> None:
    message = ChatMessage("user", "x")
    roles = [part.role for part in split_prompt((1,) * 90, (5, 20, 40, 60), [message])]
    assert roles == ["?", "?", "?", "?"]
    roles = [part.role for part in split_prompt((1,) * 90, (5, 20, 40), [message])]
    assert roles == ["system", "user", "assistant"], "a template's own"
    whole = split_prompt((1,) * 90, (5, 85), [message])
    assert not whole[0].protected, "a question that is the whole prompt"
    assert split_prompt((1,) * 90, (5, 60), [message])[0].protected is False
    assert split_prompt((1,) * 200, (150, 190), [message])[0].protected
    assert split_prompt((1,) * 90, (), []) == []


async def test_a_prompt_longer_than_the_context_is_taken_where_what_is_kept_fits(drafting: Site) -> None:
    response = await drafting.chat(LONG, max_tokens=1)
    assert response.status_code == 200, response.text
    job = drafting.door.tickets[-1].job
    assert len(job.prompt) > drafting.options.model.max_ctx
    await drafting.chat(LONG)
    job = drafting.door.tickets[-1].job
    assert job.max_tokens == 4096 - len(job.prompt) // 10, "what the kept tokens leave"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compression": {"mode": "off"}}, "Shorten the prompt"),
        ({"compression": {"keep_ratio": 0.9}}, "Compressed to a keep ratio of 0.9 it would still have"),
        ({"tools": [TOOL]}, "It cannot be compressed: tools."),
        ({"response_format": {"type": "json_object"}}, "It cannot be compressed: structured."),
    ],
)
async def test_what_does_not_fit_even_then_is_told_with_its_counts(
    drafting: Site, fields: dict[str, Any], words: str
) -> None:
    response = await drafting.chat(LONG, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert words in error["message"]
    assert error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 4096


async def test_tokens_that_nobody_could_score_are_refused_unseen(drafting: Site) -> None:
    response = await drafting.complete([5] * 8001, max_tokens=1)
    assert response.json()["error"]["n_prompt_tokens"] == 8001
    response = await drafting.complete([5] * 8000, max_tokens=1)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("tokens", "keep"), [(0, 500), (999, 500), (1000, 500), (2000, 300), (3000, 100), (5000, 100), (10**7, 100)]
)
def test_a_curve_is_straight_between_its_points(tokens: int, keep: int) -> None:
    assert interpolate_keep(((1000, 500), (3000, 100)), tokens) == keep


@pytest.mark.parametrize(
    ("rate", "step"), [(0.95, -10), (0.9, -5), (0.86, -5), (0.85, 0), (0.75, 0), (0.74, 5), (0.7, 5), (0.69, 10)]
)
def test_a_session_keeps_less_where_more_is_guessed(rate: float, step: int) -> None:
    assert adapt_ratio(SessionRatio(), rate) == SessionRatio(rate, FIRST_KEEP + step)


def test_a_session_stays_within_its_limits_and_remembers_a_mean() -> None:
    low = high = SessionRatio()
    for _ in range(50):
        low, high = adapt_ratio(low, 1.0), adapt_ratio(high, 0.0)
    assert (low.keep, high.keep) == (LEAST_KEEP, MOST_KEEP)
    assert adapt_ratio(SessionRatio(0.5, 100), 1.0).acceptance_rate == pytest.approx(0.65)


def test_the_last_sessions_are_remembered() -> None:
    sessions = CompressionSessions()
    sessions.record_acceptance("old", 10, 10)
    sessions.record_acceptance("nothing proposed", 0, 0)
    assert sessions.find_keep("old") == FIRST_KEEP - 10
    for number in range(MAX_SESSIONS - 1):
        assert sessions.find_keep(str(number)) == FIRST_KEEP
    assert sessions.find_keep("old") == FIRST_KEEP - 10, "asked for in time"
    for number in range(MAX_SESSIONS):
        sessions.find_keep(f"more {number}")
    assert sessions.find_keep("old") == FIRST_KEEP
    assert sessions.find_keep("") is None


async def test_a_session_comes_before_the_server_and_the_request_before_it(drafting: Site) -> None:
    asked = {"session": "s", "threshold": 0}
    assert (await compression(drafting, compression=asked)).keep == FIRST_KEEP
    assert (await compression(drafting, compression={**asked, "keep_ratio": 0.5})).keep == 500


@pytest.mark.parametrize(("finish", "status", "code"), [
    ("too_long", 400, "context_length_exceeded"),
    ("uncompressed", 503, "drafter_failed"),
])  # fmt: skip
async def test_what_the_engine_refuses_has_its_own_status(drafting: Site, finish: Any, status: int, code: str) -> None:
    drafting.door.fail_after, drafting.door.failure = 0, finish
    try:
        response = await drafting.chat("Hello")
    finally:
        drafting.door.reset()
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_the_response_tells_what_was_left_out() -> None:
    shown = Compressed(100, "", ((0, 10), (90, 100)), ((90, 100),), 200, 1_500_000)
    assert describe_compression(Report(20, compression=shown)) == {
        "original_tokens": 100,
        "kept_tokens": 20,
        "keep_ratio": 0.2,
        "spans": [[0, 10], [90, 100]],
        "forced_spans": [[90, 100]],
        "time_ms": 1.5,
        "why": None,
    }
