"""A tool loop of eight turns in each API, with a restart in the middle: a turn computes what is new, hardly more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest
from attrs import define, field

from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_restart import cache

TURNS = 6
BLOCK = 64  # rows; a sequence is continued at a multiple of them
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CITIES = ["Bonn", "Kiel", "Ulm", "Bern", "Genf", "Graz", "Linz", "Wien", "Rom", "Oslo"]
SYSTEM = "You look files up for somebody who writes programs, and you say briefly what is in them."
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
RESULT = "def area(width: float, height: float) -> float:\n    return width * height  # of number {}\n"


class Loop(Protocol):
    def turn(self, server: Running, number: int) -> tuple[int, int, int]:
        """Tokens of the prompt, how many of them were not computed again, and how many the next prompt begins with."""
        ...


def path(number: int) -> dict[str, str]:
    return {"path": f"shapes/{number}.py"}


@define
class Chat:
    """A client whose model calls the function itself. Its answers are not computed again either."""

    called: int = 0
    messages: list[dict[str, Any]] = field(
        factory=lambda: [{"role": "system", "content": "You answer with the functions that you have."}]
    )

    def turn(self, server: Running, number: int) -> tuple[int, int, int]:
        if calls := self.messages[-1].get("tool_calls"):
            result = '{"sky": "clear", "degrees": 21}'
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
        else:
            asked = f"What is the weather in {CITIES[number // 2]}? Use the function."
            self.messages.append({"role": "user", "content": asked})
        body = {"messages": self.messages, "tools": [{"type": "function", "function": WEATHER}], "max_tokens": 60}
        answer = server.client.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
        self.messages.append(answer["choices"][0]["message"])
        self.called += len(self.messages[-1].get("tool_calls", ()))
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["total_tokens"]


@define
class Messages:
    messages: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Mind the shapes."}])

    def turn(self, server: Running, number: int) -> tuple[int, int, int]:
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
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        return prompt, cached, prompt


@define
class Responses:
    input: list[dict[str, Any]] = field(factory=lambda: [{"role": "user", "content": "Respond with the shapes."}])
    previous: str | None = None

    def turn(self, server: Running, number: int) -> tuple[int, int, int]:
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
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]


@pytest.mark.timeout(300)
def test_a_loop_of_many_turns_computes_what_is_new(tmp_path: Path) -> None:
    """After the restart all rows are on disk. For the second and the third prompt that are restored there, some rows
    may be computed, where that is quicker.
    """
    chat = Chat()
    loops: list[Loop] = [chat, Messages(), Responses()]
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64")
    known = dict.fromkeys(range(len(loops)), 0)
    for turns in (range(TURNS // 2), range(TURNS // 2, TURNS)):
        with serving(*words, trusting=True) as server:
            for number in turns:
                for index, loop in enumerate(loops):
                    prompt, cached, begins = loop.turn(server, number)
                    new = prompt - known[index]
                    assert 0 < new < 400
                    if number == TURNS // 2:
                        assert cache(server)["hits"] == {"disk": index + 1}
                    if number != TURNS // 2 or index == 0:
                        assert prompt - cached <= new + BLOCK, (loop, number)
                    known[index] = begins
            assert server.stop() == 0
    assert min(known.values()) > 400
    assert chat.called >= 3
