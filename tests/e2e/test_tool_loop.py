"""A tool conversation of twenty turns, with a restart in the middle: each turn computes what is new, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Running, serving

BLOCK = 64  # rows; a sequence is continued at a multiple of them
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SYSTEM = "You are an assistant that answers questions about the weather with the functions that it has."
CITIES = ["Bonn", "Kiel", "Ulm", "Bern", "Genf", "Graz", "Linz", "Wien", "Rom", "Oslo"]


def turn(server: Running, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "tools": [{"type": "function", "function": WEATHER}]}
    response = server.client.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 60})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.timeout(300)
def test_every_turn_computes_what_is_new_and_a_restart_is_no_exception(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    known, called = 0, 0  # tokens of the last prompt and its answer
    turns = iter(range(20))
    for _ in range(2):
        with serving("--kv-cache-dir", str(tmp_path / "kv")) as server:
            for number in (next(turns) for _ in range(10)):
                last = messages[-1]
                if not last.get("tool_calls"):
                    city = CITIES[number // 2]
                    messages.append({"role": "user", "content": f"What is the weather in {city}? Use the function."})
                else:
                    messages += [
                        {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear", "degrees": 21}'}
                        for call in last["tool_calls"]
                    ]
                body = turn(server, messages)
                usage, timings = body["usage"], body["timings"]
                new = usage["prompt_tokens"] - known
                assert number == 0 or timings["prompt_n"] <= new + BLOCK, (number, usage, body["rekindle"])
                known = usage["total_tokens"]
                messages.append(body["choices"][0]["message"])
                called += len(messages[-1].get("tool_calls", ()))
            assert server.stop() == 0
    assert called >= 5
