"""Custom tools in chat completions and responses, and `functions` of old clients, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from effects.job import Job
from tests.http.apis.test_responses import client_of, prompt_of
from tests.http.conftest import Site, chat
from tests.http.sse import chunks
from tests.lazy_module import LazyModule

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

PATH = "/v1/chat/completions"
QUESTION: list[Any] = [{"role": "user", "content": "Edit it."}]
EDIT: dict[str, Any] = {
    "type": "custom",
    "custom": {"name": "edit", "description": "Edits.", "format": {"type": "text"}},
}
LARK = {"syntax": "lark", "definition": 'start: "x"+ "\\n"'}
HELD: dict[str, Any] = {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar", "grammar": LARK}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "edit", "arguments": {"input": "*** \\"ä\\"\\n"}}\n</tool_call>'
ADDED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OLD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


@pytest.fixture
async def sdk(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(site) as client:
        yield client


async def test_a_custom_tool_is_called_with_text_and_answered(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say(f"I edit.\n{CALL}\n{ADDED}")
    answer = await sdk.chat.completions.create(model="small", messages=QUESTION, tools=[EDIT, ADD])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    custom, function = message.tool_calls
    assert custom.type == "custom"
    assert (custom.custom.name, custom.custom.input) == ("edit", '*** "ä"\n')
    assert function.type == "function"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in (custom, function)]
    history: list[Any] = [*QUESTION, message.to_dict(), *results]
    site.say("Good.")
    again = await sdk.chat.completions.create(model="small", messages=history, tools=[EDIT, ADD])
    assert again.choices[0].message.content == "Good."
    assert CALL in prompt_of(site)


@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_a_stream_says_the_same_calls(site: Site, per_step: int) -> None:
    site.say(f"I edit.\n{CALL}\n{ADDED}\n{CALL}")
    site.door.per_step = per_step
    body = chat("Edit it.", tools=[EDIT, ADD])
    whole = (await site.post(PATH, body)).json()["choices"][0]["message"]["tool_calls"]
    found: dict[int, dict[str, Any]] = {}
    for chunk in await chunks(site, PATH, body):
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()) if chunk["choices"] else ():
            kind = part.get("type") or found[part["index"]]["type"]
            call = found.setdefault(part["index"], {"type": kind, kind: {"name": "", "arguments": "", "input": ""}})
            for name, text in part[kind].items():
                call[kind][name] += text
    expected_calls = [{key: value for key, value in call.items() if key != "id"} for call in whole]
    for call in found.values():
        call[call["type"]] = {name: text for name, text in call[call["type"]].items() if text}
    assert [*found.values()] == expected_calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off_is_passed_on_as_it_is(site: Site, stream: bool) -> None:
    said = site.say(CALL)
    body = chat("Edit it.", tools=[EDIT], max_tokens=len(said) - 12, stream=stream)
    response = await site.post(PATH, body)
    assert response.status_code == 200
    assert "***" in response.text


def grammar_of(job: Job) -> str:
    return "" if job.sampling.grammar is None else job.sampling.grammar.source


CUSTOM = {"type": "custom", "name": "edit", "description": "Edits.", "format": {"type": "grammar", **LARK}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"messages": QUESTION, "tools": [HELD]}),
        ("/v1/responses", {"input": "Edit it.", "tools": [CUSTOM]}),
    ],
)
async def test_an_answer_is_held_to_the_grammar_of_its_tool(site: Site, path: str, body: dict[str, Any]) -> None:
    answer = await site.post(path, body)
    assert answer.status_code == 200, answer.text
    assert r"/(?:x)+(?:(?:\\n))/" in grammar_of(site.door.tickets[-1].job)
    assert "x-rekindle-not-held" not in answer.headers
    assert json.dumps(f"The input must match this Lark grammar:\n{LARK['definition']}")[1:-1] in prompt_of(site)


@pytest.mark.parametrize(
    "grammar",
    [
        {"syntax": "lark", "definition": "start: nothing"},
        {"syntax": "lark", "definition": "no grammar"},
        {"syntax": "regex", "definition": "a(?=b)"},
    ],
)
async def test_a_grammar_that_cannot_be_held_is_left_to_the_model(site: Site, grammar: dict[str, str]) -> None:
    """An agent sends its tools with every request: it could never go on."""
    tool = {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar", "grammar": grammar}}}
    site.say(CALL)
    answer = await site.post(PATH, {"messages": QUESTION, "tools": [tool]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rekindle-not-held"] == "$.tools[0].custom.format"
    assert grammar_of(site.door.tickets[-1].job) == ""


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "custom", "custom": {"name": "edit"}}, True),
        ("required", True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "edit"}}]},
            },
            True,
        ),
        ("auto", False),
    ],
)
async def test_a_custom_tool_is_chosen(site: Site, choice: Any, grammar: bool) -> None:
    answer = await site.post(PATH, {"messages": QUESTION, "tools": [EDIT], "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert bool(grammar_of(site.door.tickets[-1].job)) is grammar


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom"}]}, "$.tools[0].custom", "an object"),
    ({"tools": [{"type": "other"}]}, "$.tools[0].type", "'custom'"),
    ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "$.tools[0].custom.name", "letters"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "poem"}}}]},
        "$.tools[0].custom.format.type",
        "one of",
    ),
    (
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {}}}}]},
        "$.tools[0].custom.format.grammar.syntax",
        "'lark', 'regex'",
    ),
    (
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "syntax": "lark"}}}]},
        "$.tools[0].custom.format.definition",
        "a grammar",
    ),
    ({"tools": [EDIT], "tool_choice": {"type": "custom"}}, "$.tool_choice.custom", "an object"),
    ({"functions": 5}, "$.functions", "an array"),
    ({"functions": [{"name": ""}]}, "$.functions[0].name", "letters"),
    ({"functions": [OLD, OLD]}, "$.functions[1]", "second function"),
    ({"functions": [OLD], "tools": [ADD]}, "$.functions", "repeats $.tools"),
    ({"functions": [OLD], "function_call": {"name": "sub"}}, "$.function_call.name", "none of the functions"),
    ({"functions": [OLD], "function_call": "some"}, "$.function_call", "'none', 'auto'"),
]


@pytest.mark.parametrize(("fields", "path", "why"), WRONG)
async def test_a_wrong_field_is_named(shared: Site, fields: dict[str, Any], path: str, why: str) -> None:
    response = await shared.post(PATH, {"messages": QUESTION, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, path), response.text
    assert why in error["message"]


async def test_functions_of_old_clients_are_called_and_answered(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say(f"I add.\n{ADDED}\n{ADDED}")
    answer = await sdk.chat.completions.create(model="small", messages=QUESTION, functions=[OLD], function_call="auto")  # type: ignore[call-overload]
    message, call = answer.choices[0].message, answer.choices[0].message.function_call
    assert (answer.choices[0].finish_reason, message.content, message.tool_calls) == ("function_call", "I add.", None)
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    history: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "function_call": call.to_dict()},
        {"role": "function", "name": "add", "content": "three"},
    ]
    site.say("Three.")
    again = await sdk.chat.completions.create(model="small", messages=history, functions=[OLD])  # type: ignore[call-overload]
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("Three.", "stop")
    assert f"{ADDED}<|im_end|>" in prompt_of(site)
    assert "<tool_response>\nthree\n</tool_response>" in prompt_of(site)
    old = prompt_of(site)
    new = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": call.to_dict()}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "three"},
    ]
    tool = {"type": "function", "function": OLD}
    await sdk.chat.completions.create(model="small", messages=new, tools=[tool])  # type: ignore[arg-type,list-item]
    assert prompt_of(site) == old, "it is the same conversation"


async def test_functions_are_streamed_as_they_were(site: Site) -> None:
    site.say(f"I add.\n{ADDED}")
    found = await chunks(site, PATH, chat("Add.", functions=[OLD], function_call={"name": "add"}))
    deltas = [
        choice["delta"]["function_call"]
        for chunk in found
        for choice in chunk["choices"]
        if "function_call" in choice["delta"]
    ]
    assert deltas[0] == {"name": "add", "arguments": ""}
    assert "".join(delta["arguments"] for delta in deltas) == '{"a": 1}'
    ends = [choice["finish_reason"] for chunk in found for choice in chunk["choices"]]
    assert ends[-1] == "function_call"


@pytest.mark.parametrize(
    "fields", [{"functions": []}, {"functions": [], "function_call": "none"}, {"functions": None, "tools": []}]
)
async def test_no_functions_ask_for_nothing(site: Site, fields: dict[str, Any]) -> None:
    site.say(ADDED)
    message = (await site.chat(**fields)).json()["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == (ADDED, "stop")
    with_them = site.door.tickets[-1].job.prompt
    await site.chat()
    assert site.door.tickets[-1].job.prompt == with_them


async def test_a_functions_result_without_its_call_is_told_as_text(site: Site) -> None:
    result = {"role": "function", "name": "add", "content": "three"}
    assert (await site.post(PATH, {"messages": [*QUESTION, result], "max_tokens": 1})).status_code == 200
    assert "[result of a tool call that is no longer in the conversation]\nthree" in prompt_of(site)
