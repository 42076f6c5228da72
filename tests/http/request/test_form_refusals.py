"""Every refusal of the schema compiler, in every API, with `strict` and without: by name, or left to the model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.text.answer.answer_parser import TOOL_PARSERS
from adapters.text.grammars import grammar
from effects.grammar import Grammar
from tests.http.conftest import Site, chat, served

HEADER = "x-rekindle-not-held"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "small"}
EXCLUSIVE = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}

# What a property says, and the path in it of what cannot be held.
CANNOT_BE_HELD: Mapping[str, tuple[dict[str, Any], str]] = {
    "an unknown format": ({"type": "string", "format": "zork"}, ".format"),
    "a format that is not held": ({"type": "string", "format": "uri-template"}, ".format"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, ".pattern"),
    "negative look-ahead": ({"type": "string", "pattern": "\\d+(?!x)"}, ".pattern"),
    "look-behind": ({"type": "string", "pattern": "(?<=a)b"}, ".pattern"),
    "a back-reference": ({"type": "string", "pattern": "(a)\\1"}, ".pattern"),
    "a word boundary": ({"type": "string", "pattern": "\\bfoo"}, ".pattern"),
    "an anchor inside": ({"type": "string", "pattern": "a^b"}, ".pattern"),
    "a broken pattern": ({"type": "string", "pattern": "(a"}, ".pattern"),
    "an unknown escape": ({"type": "string", "pattern": "\\cA"}, ".pattern"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    "contains": ({"type": "array", "contains": {}}, ".contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "a"}}, ".propertyNames"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {}}}, ".dependentSchemas"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, ".unevaluatedProperties"),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, ".unevaluatedItems"),
    "not": ({"type": "string", "not": {"const": ""}}, ".not"),
    "if": ({"type": "string", "if": {"const": ""}}, ".if"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, ".$dynamicRef"),
    "oneOf that overlaps": ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, ".oneOf"),
    "deep inside": ({"items": {"anyOf": [{"type": "null"}, {"not": {}}]}}, ".items.anyOf[1].not"),
    "a reference that leads nowhere": ({"$ref": "#/$defs/no"}, ".$ref"),
    "a reference elsewhere": ({"$ref": "http://127.0.0.1:1/x"}, ".$ref"),
    "patterns of names that overlap": (
        {"type": "object", "patternProperties": {"^a": {"type": "string"}, "b": {"type": "integer"}}},
        ".patternProperties",
    ),
    "look-ahead in a name": ({"type": "object", "patternProperties": {"(?=a)": {}}}, ".patternProperties"),
    "an empty range": ({"type": "integer", "minimum": 3, "maximum": 2}, ".maximum"),
    "an empty length": ({"type": "string", "minLength": 3, "maxLength": 1}, ".maxLength"),
    "too few items": ({"type": "array", "minItems": 3, "maxItems": 1}, ".maxItems"),
    "no value": ({"enum": []}, ".enum"),
    "no branch": ({"anyOf": []}, ".anyOf"),
    "a contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ".allOf"),
    "a pattern against its format": ({"type": "string", "pattern": "^a$", "format": "date"}, ".format"),
}
# What no JSON schema says. A form is refused for it, `strict` or not: it is a mistake of who wrote the request.
MALFORMED: Mapping[str, tuple[dict[str, Any], str]] = {
    "a type that there is not": ({"type": "zork"}, ".type"),
    "one of several types": ({"type": ["string", "zork"]}, ".type"),
    "a type that is a number": ({"type": 5}, ".type"),
    "an enum that is no list": ({"enum": 5}, ".enum"),
    "a limit that is a text": ({"type": "number", "minimum": "x"}, ".minimum"),
    "a negative length": ({"type": "string", "minLength": -1}, ".minLength"),
    "half a length": ({"type": "string", "minLength": 1.5}, ".minLength"),
    "a pattern that is a number": ({"type": "string", "pattern": 5}, ".pattern"),
    "multiples of nothing": ({"type": "number", "multipleOf": 0}, ".multipleOf"),
    "required that is no list": ({"type": "object", "required": 5}, ".required"),
    "a schema that is a number": ({"type": "object", "additionalProperties": 5}, ".additionalProperties"),
}


def form(schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "name": "x", "schema": schema, **({"strict": True} if strict else {})}


def chat_form(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    said = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, **({"strict": True} if strict else {})},
    }
    return "/v1/chat/completions", {**TALK, "response_format": said}


def chat_tool(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    return "/v1/chat/completions", {**TALK, "tools": [tool], "tool_choice": "required"}


def message_tool(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    tool = {"name": "f", "input_schema": schema, "strict": strict}
    return "/v1/messages", {**TALK, "tools": [tool], "tool_choice": {"type": "any"}}


def response_form(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "x", "max_output_tokens": 16, "text": {"format": form(schema, strict)}}


def response_tool(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
    return "/v1/responses", {"input": "x", "max_output_tokens": 16, "tools": [tool], "tool_choice": "required"}


EffectRequest = Callable[[Any, bool], tuple[str, dict[str, Any]]]
FORMS: Mapping[str, tuple[EffectRequest, str]] = {
    "chat, response_format": (chat_form, "$.response_format.json_schema.schema"),
    "messages, output_format": (
        lambda schema, strict: ("/v1/messages", {**TALK, "output_format": form(schema, strict)}),
        "$.output_format.schema",
    ),
    "messages, output_config": (
        lambda schema, strict: ("/v1/messages", {**TALK, "output_config": {"format": form(schema, strict)}}),
        "$.output_config.format.schema",
    ),
    "responses, text.format": (response_form, "$.text.format.schema"),
}
TOOLS: Mapping[str, tuple[EffectRequest, str]] = {
    "chat, a tool": (chat_tool, "$.tools[0].function.parameters"),
    "messages, a tool": (message_tool, "$.tools[0].input_schema"),
    "responses, a tool": (response_tool, "$.tools[0].parameters"),
}
# These have no word for `strict`.
LENIENT: Mapping[str, tuple[EffectRequest, str]] = {
    "llama.cpp, json_schema": (
        lambda schema, _: ("/completion", {"prompt": "x", "n_predict": 2, "json_schema": schema}),
        "$.json_schema",
    ),
    "vllm, guided_json": (
        lambda schema, _: ("/v1/completions", {"prompt": "x", "max_tokens": 2, "guided_json": json.dumps(schema)}),
        "$.guided_json",
    ),
}


def whole(said: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"b": {"type": "boolean"}, "a": said}, "required": ["b", "a"]}


def last_grammar(site: Site) -> Grammar:
    """Return what the answer to the last request was held to."""
    found = site.door.tickets[-1].job.sampling.grammar
    assert found is not None
    return found


async def ask(site: Site, how: EffectRequest, said: dict[str, Any], *, strict: bool) -> httpx.Response:
    path, body = how(whole(said), strict)
    return await site.post(path, body)


def refused(response: httpx.Response) -> str:
    """The message of a 400, which names the place in front of everything and quotes none of our rules."""
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    for ours in ("start:", "body:", "rest0", "%json", "x-guidance", "whole", "coerce_one_of", "Unimplemented"):
        assert ours not in message
    return message


def take_turns(names: Iterable[str], *apis: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each name with one API of each of these groups. Every API has its turn, since what is found out is common."""
    return [(name, [*group][number % len(group)]) for number, name in enumerate(names) for group in apis]


@pytest.mark.parametrize(("name", "api"), take_turns([*CANNOT_BE_HELD, *MALFORMED], {**FORMS, **TOOLS}))
async def test_with_strict_the_keyword_and_its_path_are_named(shared: Site, api: str, name: str) -> None:
    how, base = {**FORMS, **TOOLS}[api]
    said, keyword = {**CANNOT_BE_HELD, **MALFORMED}[name]
    message = refused(await ask(shared, how, said, strict=True))
    assert message.startswith(f"{base}.properties.a{keyword}"), message


@pytest.mark.parametrize(("name", "api"), take_turns(CANNOT_BE_HELD, {**FORMS, **TOOLS, **LENIENT}))
async def test_without_strict_it_is_left_to_the_model_and_the_header_says_so(shared: Site, api: str, name: str) -> None:
    how, base = {**FORMS, **TOOLS, **LENIENT}[api]
    said, keyword = CANNOT_BE_HELD[name]
    response = await ask(shared, how, said, strict=False)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER].split()[0].startswith(f"{base}.properties.a{keyword}")
    assert '"boolean"' in last_grammar(shared).source, "the rest is held"


@pytest.mark.parametrize(("name", "api"), take_turns(MALFORMED, FORMS, TOOLS, LENIENT))
async def test_a_schema_that_is_none_refuses_a_form_and_no_tool(shared: Site, api: str, name: str) -> None:
    """Agents cannot mend the tools that they were given, and would be refused for ever."""
    how, base = {**FORMS, **TOOLS, **LENIENT}[api]
    said, keyword = MALFORMED[name]
    response = await ask(shared, how, said, strict=False)
    if api in TOOLS:
        assert response.status_code == 200, response.text
        assert response.headers[HEADER].startswith(f"{base}.properties.a{keyword}")
    else:
        assert refused(response).startswith(f"{base}.properties.a{keyword}")


async def test_a_schema_that_can_be_held_has_no_such_header(shared: Site) -> None:
    for how, _ in {**FORMS, **TOOLS, **LENIENT}.values():
        for strict in (False, True):
            response = await ask(shared, how, {"type": "string", "format": "date"}, strict=strict)
            assert response.status_code == 200, response.text
            assert HEADER not in response.headers


async def test_names_in_a_header_are_escaped(shared: Site) -> None:
    schema = {"type": "object", "properties": {"é \r\nx: y": {"format": "zork", "type": "string"}}}
    response = await shared.complete(max_tokens=2, guided_json=schema)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "$.guided_json.properties.%C3%A9%20%0D%0Ax%3A%20y.format"


async def test_of_many_places_the_header_names_the_first(shared: Site) -> None:
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string", "format": "zork"} for at in range(20)}}
    response = await shared.complete(max_tokens=2, guided_json=schema)
    assert response.headers[HEADER].endswith(" $.guided_json.properties.p15.format +4")


@pytest.fixture(scope="module")
async def hasty(folder: Path) -> AsyncIterator[Site]:
    """A server whose grammars have a fifth of the processor time, so that what costs too much is found out sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "COMPILE_SECONDS", grammar.COMPILE_SECONDS / 5)
        async with served(folder) as site:
            yield site


COSTLY = {"prefixItems": [{"type": "integer", "multipleOf": 99991 + at} for at in range(50)], "type": "array"}


@pytest.mark.parametrize("strict", [False, True])
async def test_a_form_that_costs_too_much_keeps_its_type_where_it_may(hasty: Site, strict: bool) -> None:
    path, body = chat_form(COSTLY, strict)
    response = await hasty.post(path, body)
    if strict:
        assert refused(response).startswith("$.response_format.json_schema.schema: cannot be held to: ")
        return
    assert response.headers[HEADER] == "$.response_format.json_schema.schema"
    assert '{"type":"array"' in last_grammar(hasty).source


def tool(number: int, schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema, "strict": strict}}


def usual(number: int) -> dict[str, Any]:
    """Six arguments and more, as the tools of agents have them."""
    types = ("string", "integer", "boolean", "number")
    said = {f"argument_{at}_{number % 7}": {"type": types[at % 4], "description": "x" * 60} for at in range(6)}
    return {
        "type": "object",
        "properties": {**said, "kind": {"enum": ["a", "b"]}, "items": {"type": "array", "items": {"type": "string"}}},
        "required": ["kind"],
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
async def wide(folder: Path) -> AsyncIterator[Site]:
    """A server with room for the descriptions of some hundred tools."""
    async with served(folder, max_ctx=1 << 18) as site:
        yield site


LONGEST_GRAMMARS = ("harmony", "minimax-xml")  # of the forms in which a call's arguments are JSON, and of the others


@pytest.mark.parametrize(
    ("parser", "count"),
    [
        *((parser, 8) for parser in TOOL_PARSERS[:-1]),
        (LONGEST_GRAMMARS[0], 300),
        *(
            pytest.param(parser, 300, marks=pytest.mark.long)
            for parser in TOOL_PARSERS[:-1]
            if parser != LONGEST_GRAMMARS[0]
        ),
    ],
)
async def test_three_hundred_strict_tools_are_all_held(wide: Site, parser: str, count: int) -> None:
    tools = [tool(number, usual(number), strict=True) for number in range(count)]
    wide.text.calls = parser
    for choice in ("auto", "required"):
        response = await wide.chat(tools=tools, tool_choice=choice, max_tokens=2)
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers
        source = last_grammar(wide).source
        if parser == "harmony":  # its arguments are JSON
            assert all(f"functions.tool_{number} " in source for number in range(count))
            assert source.count("argument_5_") >= count
        else:
            assert all(f"rest{number}:" in source for number in range(count))


@pytest.mark.parametrize("strict", [False, True])
async def test_a_schema_that_no_text_keeps_to_refuses_a_strict_form_only(shared: Site, strict: bool) -> None:
    _, body = chat_form({"$ref": "#"}, strict)
    response = await shared.complete(max_tokens=2, response_format=body["response_format"])
    if strict:
        assert "no text keeps to it" in refused(response)
    else:
        assert response.headers[HEADER] == "$.response_format.json_schema.schema"


@pytest.mark.parametrize("strict", [False, True])
async def test_of_tools_that_do_not_fit_together_the_largest_are_left_out(hasty: Site, strict: bool) -> None:
    """This holds with `strict` and without: an agent with too many tools has to be served."""
    tools = [tool(0, usual(0), strict), tool(1, {"type": "object", "properties": {"a": COSTLY}}, strict)]
    response = await hasty.chat(tools=[*tools, tool(2, usual(2), strict)], tool_choice="required", max_tokens=2)
    assert response.status_code == 200, response.text
    assert "$.tools[1].function.parameters" in response.headers[HEADER].split()
    assert "multipleOf" not in last_grammar(hasty).source
    assert "tool_1" in last_grammar(hasty).source, "it may be called with any object"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tool_0"}}], ids=str)
async def test_calls_that_have_to_be_made_are_held_to_their_schema(shared: Site, choice: Any) -> None:
    """This holds with `strict` and without. Without it, a call that the model chooses to make is not held to its
    schema.
    """
    tools = [tool(0, whole({"type": "string"}), strict=False)]
    assert (await shared.chat(tools=tools, tool_choice=choice, max_tokens=2)).status_code == 200
    assert '"b":{"type":"boolean"}' in last_grammar(shared).source
    assert '"additionalProperties":false' in last_grammar(shared).source
    assert (await shared.chat(tools=tools, tool_choice="auto", max_tokens=2)).status_code == 200
    assert shared.door.tickets[-1].job.sampling.grammar is None


async def test_what_became_of_tools_is_remembered_for_the_next_turn(site: Site) -> None:
    tools = [tool(0, whole({"type": "string", "format": "zork"}), strict=False)]
    asked = chat(tools=tools, tool_choice="required", max_tokens=2)
    first = await site.post("/v1/chat/completions", asked)
    async with site.text.grammars.queue.wait_turn(""):  # a trial would wait here
        second = await site.post("/v1/chat/completions", asked)
    assert first.headers[HEADER] == second.headers[HEADER]
    assert site.door.tickets[0].job.sampling.grammar == site.door.tickets[1].job.sampling.grammar
    tools = [tool(0, whole({"type": "string", "format": "zork"}), strict=True)]
    refused(await site.post("/v1/chat/completions", {**asked, "tools": tools}))
