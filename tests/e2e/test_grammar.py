"""Answers of a given form from a real server: the same with a draft and without, and again in a replay on the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from adapters.text.grammars.closed_schema import close_schema
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
# As instructor sends it for a pydantic model: nothing says `strict` or `additionalProperties`.
PET: dict[str, Any] = {
    "$defs": {
        "Home": {
            "properties": {
                "street": {"maxLength": 20, "title": "Street", "type": "string"},
                "number": {"type": "integer"},
            },
            "required": ["street", "number"],
            "title": "Home",
            "type": "object",
        }
    },
    "properties": {
        "name": {"description": "Its name", "maxLength": 20, "type": "string"},
        "age": {"maximum": 30, "minimum": 0, "type": "integer"},
        "tame": {"type": "boolean"},
        "home": {"anyOf": [{"$ref": "#/$defs/Home"}, {"type": "null"}], "default": None},
    },
    "required": ["name", "age", "tame"],
    "title": "Pet",
    "type": "object",
}


def test_what_instructor_asks_for_is_held_in_both_of_its_modes() -> None:
    tool = {"type": "function", "function": {"name": "Pet", "parameters": PET}}
    named = {"type": "function", "function": {"name": "Pet"}}
    form = {"type": "json_schema", "json_schema": {"name": "Pet", "schema": PET}}
    with serving() as server:
        for seed in range(2):
            how = {"seed": seed, "max_tokens": 300, "temperature": 1.0}
            called = server.chat("Tom is three.", tools=[tool], tool_choice=named, parallel_tool_calls=False, **how)
            (call,) = called.json()["choices"][0]["message"]["tool_calls"]
            said = server.chat("Tom is three.", response_format=form, **how).json()["choices"][0]["message"]["content"]
            for written in (call["function"]["arguments"], said):
                found = json.loads(written, object_pairs_hook=no_key_twice)
                jsonschema.validate(found, close_schema(PET))
        assert server.stop() == 0


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key twice: {pairs}"
    return found


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
