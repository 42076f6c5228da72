"""The form of an answer as clients ask for it: one grammar in the job, or an error that names what was wrong."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from adapters.http.request.response_format import MOST_TEXT
from adapters.text.grammars.closed_schema import close_schema
from effects.grammar import Grammar
from tests.http.conftest import Site, chat
from tests.http.sse import stream

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = close_schema(SCHEMA)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def held(site: Site) -> Grammar:
    grammar = site.door.tickets[-1].job.sampling.grammar
    assert grammar is not None
    return grammar


def schema_of(grammar: Grammar) -> dict[str, Any]:
    assert grammar.kind == "json_schema"
    found: dict[str, Any] = json.loads(grammar.source)
    assert found.pop("x-guidance")
    return found


SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", SCHEMAS, ids=str)
async def test_a_schema_by_every_name(site: Site, path: str, fields: dict[str, Any]) -> None:
    response = await site.post(path, {**chat(), "prompt": "x", "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    if path == COMPLETIONS:  # in chat the model may think first
        assert schema_of(held(site)) == CLOSED
    else:
        assert json.dumps(CLOSED["properties"], separators=(",", ":")) in held(site).source


OTHERS: list[tuple[dict[str, Any], Grammar]] = [
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["yes", 'n"o']}, Grammar("lark", 'start: "yes" | "n\\"o"')),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("lark", 'start: "a"')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
]


@pytest.mark.parametrize(("fields", "grammar"), OTHERS, ids=str)
async def test_other_forms(site: Site, fields: dict[str, Any], grammar: Grammar) -> None:
    response = await site.complete(max_tokens=2, **fields)
    assert response.status_code == 200, response.text
    assert held(site) == grammar


@pytest.mark.parametrize("name", ["grammar", "ebnf", "guided_grammar"])
async def test_gbnf_becomes_rules(site: Site, name: str) -> None:
    response = await site.complete(max_tokens=2, **{name: 'root ::= "yes" | "no" [0-9]+'})
    assert response.status_code == 200, response.text
    assert "start:" in held(site).source


async def test_any_object(site: Site) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"guided_json_object": True}):
        assert (await site.complete(max_tokens=2, **fields)).status_code == 200
        assert schema_of(held(site)) == {"type": "object"}


@pytest.mark.parametrize(
    ("meanwhile", "takes", "status"),
    [({"state": "draining"}, "draining", 503), ({"slots": 0, "max_queue": 0}, "queue_full", 429)],
    ids=["the server stops", "the queue fills up"],
)
async def test_who_waits_for_a_grammar_is_told_what_has_happened_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch, meanwhile: dict[str, Any], takes: str, status: int
) -> None:
    """And not that it had left."""
    line = site.text.grammars.queue  # for as long as a grammar of two seconds would hold it
    answers: list[int] = []

    async def ask() -> None:
        answers.append((await site.complete(max_tokens=2, guided_regex="ab")).status_code)

    async with anyio.create_task_group() as tasks, line.wait_turn(""):
        tasks.start_soon(ask)
        while not line.waiting_count:  # noqa: ASYNC110 - a queue announces no changes
            await anyio.sleep(0.01)
        for name, value in meanwhile.items():
            monkeypatch.setattr(site.door, name, value)
        assert site.door.get_acceptance() == takes
    assert answers == [status]


async def test_such_an_answer_ends_with_its_grammar(site: Site) -> None:
    await site.complete(max_tokens=2, guided_regex="a+", ignore_eos=True, stop_token_ids=[50])
    assert set(site.door.tickets[-1].job.stop_tokens) == {*site.text.tokenizer.end_tokens, 50}


@pytest.mark.parametrize(
    ("choice", "said"),
    [("required", "call0"), ({"type": "function", "function": {"name": "f"}}, "call0"), ("auto", "FREE")],
)
async def test_tools_are_held_to_their_schemas(site: Site, choice: Any, said: str) -> None:
    response = await site.chat(tools=[TOOL], tool_choice=choice, max_tokens=2)
    assert response.status_code == 200, response.text
    assert said in held(site).source
    assert '"required":["a"]' in held(site).source


async def test_nobody_else_is_held_to_anything(site: Site) -> None:
    free = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    for fields in (
        {},
        {"tools": [free]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ):
        assert (await site.chat(max_tokens=2, **fields)).status_code == 200
        assert site.door.tickets[-1].job.sampling.grammar is None


async def test_messages_have_a_name_of_their_own(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "small"}
    form = {"type": "json_schema", "schema": SCHEMA}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        response = await site.post("/v1/messages", {**body, **more})
        assert response.status_code == 200, response.text
        assert '"required":["a"]' in held(site).source


async def test_responses_have_a_name_of_their_own(site: Site) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    response = await site.post("/v1/responses", {"input": "x", "max_output_tokens": 16, "text": {"format": form}})
    assert response.status_code == 200, response.text
    assert response.json()["text"]["format"] == form
    assert '"required":["a"]' in held(site).source


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "(a"}, "$.guided_regex", "unclosed group"),
    ({"guided_regex": 5}, "$.guided_regex", "must be a string, not 5"),
    ({"guided_json": "{"}, "$.guided_json", "must be a JSON schema"),
    ({"guided_json": f'{{"a":[{"[]," * MOST_TEXT}1]}}'}, "$.guided_json", f"must have at most {MOST_TEXT} characters"),
    ({"guided_json": 5}, "$.guided_json", "a JSON schema"),
    ({"guided_json": [1]}, "$.guided_json", "a JSON schema"),
    ({"guided_json": "[1]"}, "$.guided_json", "an object"),
    ({"guided_choice": ["a", 1]}, "$.guided_choice", "an array of 1 to 4096 texts"),
    ({"guided_choice": [""]}, "$.guided_choice", "an array of 1 to 4096 texts, none of them empty"),
    ({"guided_json_object": "yes"}, "$.guided_json_object", "true or false"),
    ({"grammar": "no ::= grammar ("}, "$.grammar", "a grammar in GBNF or Lark"),
    ({"grammar": "start: a"}, "$.grammar", 'unknown name: "a"'),
    ({"grammar": "root ::= other"}, "$.grammar", "Rule 'other' not found"),
    ({"grammar": "\n" * 60_000 + "x"}, "$.grammar", "took more than 2 s of processor time"),
    ({"grammar": "x" * 70_000}, "$.grammar", "at most 65536 characters"),
    ({"json_schema": {"type": "zork"}}, "$.json_schema.type", "Invalid type: zork"),
    ({"structured_outputs": {"regex": "("}}, "$.structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "$.structured_outputs.choice", "repeats"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "$.guided_regex", "repeats $.response_format"),
    ({"response_format": {}}, "$.response_format.type", "one of 'text'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "$.response_format.json_schema", "5"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "$.response_",
        "true or",
    ),
]


@pytest.mark.parametrize(("fields", "path", "said"), BAD, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_named(shared: Site, fields: dict[str, Any], path: str, said: str) -> None:
    response = await shared.complete(**fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith(path)
    assert said in error["message"]


async def test_a_schema_that_is_nested_too_deeply_is_refused(shared: Site) -> None:
    for levels in (100, 400):
        body = '{"prompt": "x", "max_tokens": 1, "guided_json": ' + '{"items":' * levels + "{}" + "}" * levels + "}"
        response = await shared.client.post(COMPLETIONS, content=body)
        assert response.status_code == 400, response.text


async def test_a_dead_end_is_told(site: Site) -> None:
    site.door.fail_after, site.door.failure = 3, "dead_end"
    response = await site.complete(max_tokens=8, guided_regex="a+")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (422, "form_dead_end")
    assert response.headers["x-should-retry"] == "false"
    assert "in the requested form" in error["message"]
    _, events = await stream(site, COMPLETIONS, {"prompt": "x", "max_tokens": 8, "guided_regex": "a+"})
    assert json.loads(events[-1])["error"]["code"] == "form_dead_end"
