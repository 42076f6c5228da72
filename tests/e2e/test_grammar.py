"""Answers of a given form from a real server: the same with a draft and without, and again in a replay on the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from engine.__main__ import main
from tests.e2e.prepared import serving
from tests.schemas import schema_of

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "color": {"enum": ["red", "blue"]},
                "coats": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["color", "coats"],
            "additionalProperties": False,
        },
    },
}


def test_answers_keep_to_their_form_with_and_without_a_draft_and_replay(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.zst"
    with serving("--trace", str(trace)) as server:
        for seed in (1, 2):
            schema = schema_of(seed)
            form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
            how = {"response_format": form, "seed": seed, "max_tokens": 500, "temperature": 0.7}
            said = [
                server.chat("Answer as JSON.", **how, speculation=speculation).json()["choices"][0]
                for speculation in ("auto", "off")
            ]
            assert said[0] == said[1]
            assert said[0]["finish_reason"] == "stop"
            jsonschema.validate(json.loads(said[0]["message"]["content"]), schema)
        called = server.chat("Paint it.", tools=[TOOL], tool_choice="required", max_tokens=200, temperature=1).json()
        calls = called["choices"][0]["message"]["tool_calls"]
        assert called["choices"][0]["finish_reason"] == "tool_calls"
        for call in calls:
            assert call["function"]["name"] == "paint"
            jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])
        assert server.complete("x", guided_choice=["yes", "no"]).json()["choices"][0]["text"] in {"yes", "no"}
        assert server.stop() == 0
    assert main(["replay", str(trace), "--execute"]) == 0
