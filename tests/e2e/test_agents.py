"""Tests of what agents do to a server's slots and prompts: side requests between turns, and prompts that change at
every turn.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from tests.e2e.prepared import serving
from tests.e2e.server import Running

PROSE = "The shapes have sides, and each side has a length that somebody measured once. "
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def turn(server: Running, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."})
    return dict(answer)


def title(server: Running, number: int) -> None:
    instructions = "You give conversations a title of at most five words, and say nothing else. " * 4
    asked = [{"role": "system", "content": instructions}, {"role": "user", "content": f"Chat {number}. {PROSE * 3}"}]
    turn(server, asked)


@pytest.mark.timeout(300)
def test_titles_between_two_turns_leave_a_conversation_on_the_device() -> None:
    with serving("--slots", "2", "--host-cache-budget", "0") as server:
        messages = [{"role": "user", "content": PROSE * 20}]
        before = turn(server, messages, tools=[TOOL])["usage"]["prompt_tokens"]
        for number in range(3):
            title(server, number)
        messages.append({"role": "user", "content": "And then?"})
        reported = turn(server, messages, tools=[TOOL])["rekindle"]
        assert reported["tier"] == "device"
        assert reported["restored_tokens"] > before - 64


GIT = """\
gitStatus: This is the git status at the start of the conversation. Note that this status is a snapshot in time, and \
will not update during the conversation.
Current branch: main

Status:
 M shapes/sides.py

Recent commits:
5183890 Sides have lengths
d6c99bb Shapes have sides"""
RESUMED = GIT.replace(" M shapes/sides.py", "A  shapes/angles.py")
ENV = "<env>\nWorking directory: /srv/shapes\nPlatform: linux\nToday's date: 2026-11-22\n</env>"


def prompts(server: Running, turns: int, resumed: int = 99, **fields: Any) -> list[tuple[int, int]]:
    """Send turns as Claude Code does. Return the tokens of each prompt, and how many of them were computed.

    resumed: the turn from which a second process goes on, which finds another git status.
    """
    draw, reported = random.Random(5), list[tuple[int, int]]()
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Which shapes are there? {PROSE}"}]
    counters = list[str]()
    for number in range(turns):
        counters.append(f"<total_tokens>{15_000_000 - 731 * number} tokens left</total_tokens>")
        nonce = f"{draw.getrandbits(20):05x}"
        billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
        texts = (billing, PROSE * 30, ENV, "\n".join((GIT if number < resumed else RESUMED, *counters)))
        settings = f"Runs a command. Not to be written: /tmp/claude-settings-{UUID(int=draw.getrandbits(128))}.json"
        body = {
            "system": [{"type": "text", "text": text} for text in texts],
            "tools": [{"name": "Bash", "description": settings, "input_schema": {"type": "object", "properties": {}}}],
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            **fields,
        }
        answer = server.client.post("/v1/messages", json=body).json()
        usage = answer["usage"]
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        reported.append((computed + usage["cache_read_input_tokens"], computed))
        messages += [
            {"role": "assistant", "content": answer["content"] or "."},
            {"role": "user", "content": f"And {number}? {PROSE}"},
        ]
    return reported


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [pytest.param("demo", marks=pytest.mark.long), "demo-hybrid"])
def test_a_prompt_whose_head_changes_at_every_turn_is_read_once(model: str) -> None:
    with serving(model, "--max-ctx", "8192") as server:
        off, known = prompts(server, 2, stabilize="off"), prompts(server, 4)
    for whole, computed in off:
        assert computed > whole - 64  # from the first line on
    for (before, _), (whole, computed) in pairwise(known):
        assert 0 < whole - before < 100
        assert computed <= whole - before + 24 + 64 + 40  # with the answer, a block, and what went behind the message


# By default the test above changes the head at every turn.
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_a_session_that_is_resumed_with_another_status_is_read_on_and_not_again(model: str) -> None:
    with serving(model, "--max-ctx", "8192") as server:
        reported = prompts(server, 6, resumed=3, tool_choice={"type": "none"})
    grown = [whole - before for (before, _), (whole, _) in pairwise(reported)]
    assert 100 < grown[2] < 300, "the new status is behind its message"
    for more, (_, computed) in zip(grown, reported[1:], strict=True):
        assert 0 < computed <= more + 24 + 64 + 40
