"""What agents do to a server's slots and prompts: side requests between the turns of a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server import Running, serving

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


@pytest.mark.timeout(120)
def test_titles_between_two_turns_leave_a_conversation_on_the_device() -> None:
    with serving("--slots", "2", "--host-cache-budget", "0") as server:
        messages = [{"role": "user", "content": PROSE * 20}]
        before = turn(server, messages, tools=[TOOL])["usage"]["prompt_tokens"]
        for number in range(4):
            title(server, number)
        messages.append({"role": "user", "content": "And then?"})
        told = turn(server, messages, tools=[TOOL])["rekindle"]
        assert told["tier"] == "device"
        assert told["restored_tokens"] > before - 64
