"""A tool loop of twenty turns in each API, with a restart in the middle: a turn reads what is new, and little more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest
from attrs import define, field

from tests.e2e.server import Running, serving

TURNS = 20
CHUNK = 64
SYSTEM = "You look files up for somebody who writes programs, and you say briefly what is in them."
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
RESULT = "def area(width: float, height: float) -> float:\n    return width * height  # of number {}\n"


class Loop(Protocol):
    def turn(self, server: Running, number: int) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were not computed again. The turn ends with a tool's result."""
        ...


def path(number: int) -> dict[str, str]:
    return {"path": f"shapes/{number}.py"}


@define
class Chat:
    messages: list[dict[str, Any]] = field(
        factory=lambda: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Chat about the shapes."}]
    )

    def turn(self, server: Running, number: int) -> tuple[int, int]:
        function = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
        body = {"messages": self.messages, "tools": [{"type": "function", "function": function}], "max_tokens": 8}
        answer = server.client.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
        called = {"name": "read", "arguments": json.dumps(path(number))}
        call = {"id": f"call_{number}", "type": "function", "function": called}
        said = answer["choices"][0]["message"]["content"] or ""
        self.messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": RESULT.format(number)},
        ]
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@define
class Messages:
    messages: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Mind the shapes."}])

    def turn(self, server: Running, number: int) -> tuple[int, int]:
        body = {
            "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            "messages": self.messages,
            "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
        }
        answer = server.client.post("/v1/messages", json={**body, "max_tokens": 8, "temperature": 0}).json()
        texts = [block for block in answer["content"] if block["type"] == "text" and block["text"]]
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": path(number)}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT.format(number)}
        self.messages += [{"role": "assistant", "content": [*texts, call]}, {"role": "user", "content": [result]}]
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


@define
class Responses:
    input: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Respond with the shapes."}])
    previous: str | None = None

    def turn(self, server: Running, number: int) -> tuple[int, int]:
        tool = {"type": "function", "name": "read", "description": "Reads a file.", "parameters": SCHEMA}
        body = {"instructions": SYSTEM, "input": self.input, "previous_response_id": self.previous, "tools": [tool]}
        answer = server.client.post("/v1/responses", json={**body, "max_output_tokens": 8, "temperature": 0}).json()
        self.previous = answer["id"]
        called = {"name": "read", "arguments": json.dumps(path(number))}
        self.input = [
            {"type": "function_call", "call_id": f"call_{number}", **called},
            {"type": "function_call_output", "call_id": f"call_{number}", "output": RESULT.format(number)},
        ]
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.timeout(180)
def test_a_loop_of_twenty_turns_reads_what_is_new(tmp_path: Path) -> None:
    loops: list[Loop] = [Chat(), Messages(), Responses()]
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64", "--chunk", str(CHUNK))
    before = dict.fromkeys(range(len(loops)), 0)
    for turns in (range(TURNS // 2), range(TURNS // 2, TURNS)):
        with serving(*words) as server:
            for number in turns:
                for place, loop in enumerate(loops):
                    prompt, cached = loop.turn(server, number)
                    new = prompt - before[place]
                    assert 0 < new < 400
                    assert prompt - cached <= new + CHUNK, (loop, number)
                    before[place] = prompt
            assert server.stop() == 0
    assert min(before.values()) > 1000
