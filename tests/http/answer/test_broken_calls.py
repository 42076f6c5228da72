"""Calls that a model writes badly, over HTTP in three APIs: why an answer ended agrees with what it calls."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from attrs import field, frozen

from tests.http.conftest import Site
from tests.http.sse import stream
from tests.pairs import in_turns

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
FUNCTION = {"name": "write", "parameters": SCHEMA}


@frozen
class WireAnswer:
    """calls: names and arguments, as they were written.  ended: why, in the API's own word."""

    text: str
    calls: list[tuple[str, str]]
    ended: str
    stop: str | None = None
    thought: str = field(default="")


async def events(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response, found = await stream(site, path, body)
    assert response.status_code == 200, found
    return [json.loads(event) for event in found if event.startswith("{")]


async def ask_chat(site: Site, streamed: bool, stop: str | None) -> WireAnswer:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "stop": stop}
    if not streamed:
        (choice,) = (await site.post("/v1/chat/completions", body)).json()["choices"]
        message = choice["message"]
        made = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
        thought = message.get("reasoning_content", "")
        return WireAnswer(message["content"] or "", made, choice["finish_reason"], None, thought)
    text, thought, ended, calls = "", "", "", list[list[str]]()
    for chunk in await events(site, "/v1/chat/completions", body):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            thought += choice["delta"].get("reasoning_content") or ""
            ended = choice["finish_reason"] or ended
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return WireAnswer(text, [(name, arguments) for name, arguments in calls], ended, None, thought)


async def ask_messages(site: Site, streamed: bool, stop: str | None) -> WireAnswer:
    tools = [{"name": "write", "input_schema": SCHEMA}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 500}
    body |= {"stop_sequences": [stop]} if stop else {}
    if not streamed:
        message = (await site.post("/v1/messages", body)).json()
        blocks = message["content"]
        made = [(one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use"]
        text = "".join(one["text"] for one in blocks if one["type"] == "text")
        thought = "".join(one["thinking"] for one in blocks if one["type"] == "thinking")
        return WireAnswer(text, made, message["stop_reason"], message["stop_sequence"], thought)
    text, thought, calls, last = "", "", list[list[str]](), dict[str, Any]()
    for event in await events(site, "/v1/messages", body):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            thought += event["delta"].get("thinking", "")
            if "partial_json" in event["delta"]:
                calls[-1][1] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            last = event["delta"]
    made = [(name, json.dumps(json.loads(arguments))) for name, arguments in calls]
    return WireAnswer(text, made, last["stop_reason"], last["stop_sequence"], thought)


async def ask_responses(site: Site, streamed: bool, stop: str | None) -> WireAnswer:
    assert stop is None, "it has no stop strings"
    body: dict[str, Any] = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    if streamed:
        found = await events(site, "/v1/responses", body)
        said, response = found[:-1], found[-1]["response"]
        done = [one for one in said if one["type"] == "response.function_call_arguments.done"]
        deltas = [one for one in said if one["type"] == "response.function_call_arguments.delta"]
        assert "".join(one["delta"] for one in deltas) == "".join(one["arguments"] for one in done)
    else:
        response = (await site.post("/v1/responses", body)).json()
    items = response["output"]
    made = [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
    assert all(one["status"] == "completed" for one in items)
    parts = [part for one in items if one["type"] in {"message", "reasoning"} for part in one["content"]]
    text = "".join(part["text"] for part in parts if part["type"] == "output_text")
    thought = "".join(part["text"] for part in parts if part["type"] == "reasoning_text")
    return WireAnswer(text, made, response["status"], None, thought)


@frozen
class AskedApi:
    """ended: what it says of an answer without calls, and of one with calls.  stopped: of one with a stop string."""

    ask: Callable[[Site, bool, str | None], Awaitable[WireAnswer]]
    ended: tuple[str, str]
    stopped: str


APIS = {
    "chat": AskedApi(ask_chat, ("stop", "tool_calls"), "stop"),
    "messages": AskedApi(ask_messages, ("end_turn", "tool_use"), "stop_sequence"),
    "responses": AskedApi(ask_responses, ("completed", "completed"), "completed"),
}
XML = "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "write", "arguments": {"path": "a.py"}}\n</tool_call>'
MADE = [("write", '{"path": "a.py"}')]
SEED = "<seed:tool_call>\n<function=write>\n<parameter=path>a.py</parameter>\n</function>\n</seed:tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.py</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
GLM = "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n</tool_call>"
MISTRAL = '[TOOL_CALLS]write[ARGS]{"path": "a.py"}'
CALLS = {
    "qwen-xml": XML,
    "hermes": HERMES,
    "seed-xml": SEED,
    "minimax-xml": MINIMAX,
    "glm-xml": GLM,
    "mistral": MISTRAL,
    "mistral-json": f"[TOOL_CALLS][{HERMES.splitlines()[1]}]",
}
UNDECLARED = XML.replace("write", "main")
# The form, what is written, and the text, calls and reasoning that come of it.
ANSWERS = {
    "xml": ("qwen-xml", f"So:\n{XML}", "So:", MADE, ""),
    "xml, closers missing": ("qwen-xml", XML.partition("\n</parameter>")[0], "", MADE, ""),
    "xml, an undeclared name": ("qwen-xml", UNDECLARED, UNDECLARED, [], ""),
    "xml, a name in text": ("qwen-xml", "You write <function=write> here.", "You write <function=write> here.", [], ""),
    "xml, in reasoning": ("qwen-xml", f"<think>\nI do.\n{XML}", "", MADE, "I do."),
    **{f"{form}, a call": (form, f"So:\n{call}", "So:", MADE, "") for form, call in CALLS.items()},
    **{f"{form}, twice": (form, f"{call}\n{call}", "", MADE * 2, "") for form, call in CALLS.items()},
    **{f"{form}, in reasoning": (form, f"<think>\nI do.\n{call}", "", MADE, "I do.") for form, call in CALLS.items()},
    **{f"{form}, undeclared": (form, call.replace("write", "main"), None, [], "") for form, call in CALLS.items()},
    "glm, closers missing": ("glm-xml", GLM.partition("</arg_value>")[0], "", MADE, ""),
    "minimax, closers missing": ("minimax-xml", MINIMAX.partition("</parameter>")[0], "", MADE, ""),
    "mistral, the end missing": ("mistral", MISTRAL[:-2], "", MADE, ""),
    "mistral, listed": ("mistral", CALLS["mistral-json"], "", MADE, ""),
    "hermes, repaired": ("hermes", HERMES.replace('"', "'").replace("}}", ",}}"), "", MADE, ""),
    "hermes, closers missing": ("hermes", HERMES.partition("}}")[0], "", MADE, ""),
    "hermes, no object": ("hermes", HERMES.replace('{"path": "a.py"}', "[1]"), None, [], ""),
    "hermes, bare": ("hermes", HERMES.split("\n")[1], "", MADE, ""),
    "hermes, in reasoning": ("hermes", f"<think>\nI do.\n{HERMES}", "", MADE, "I do."),
}


@pytest.fixture(params=CALLS)
def form(site: Site, request: pytest.FixtureRequest) -> Iterator[str]:
    before, site.text.calls = site.text.calls, request.param
    yield request.param
    site.text.calls = before


# The first form meets each API whole and streamed, each other form one API in each way.
@in_turns("form", "api", full=1)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_why_an_answer_ended_agrees_with_its_calls(site: Site, form: str, api: str, streamed: bool) -> None:
    for name, (of_form, written, text, calls, thought) in ANSWERS.items():
        if of_form != form:
            continue
        site.say(written)
        for per_step in (1, 1000):
            site.door.per_step = per_step
            said = await APIS[api].ask(site, streamed, None)
            assert (said.text, said.thought) == (written if text is None else text, thought), name
            assert said.calls == calls, name
            assert said.ended == APIS[api].ended[bool(calls)], name


HARMONY_CALL = '<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"path": "a.py"}<|call|>'
THINKING = "<|channel|>analysis<|message|>I do.<|end|><|start|>assistant"
HARMONY = {
    "a final message": ("<|channel|>final<|message|>So.", "So.", [], ""),
    "reasoning and a final message": (f"{THINKING}<|channel|>final<|message|>So.", "So.", [], "I do."),
    "a call": (HARMONY_CALL, "", MADE, ""),
    "reasoning, a preamble and a call": (
        f"{THINKING}<|channel|>commentary<|message|>So.<|end|><|start|>assistant{HARMONY_CALL}",
        "So.",
        MADE,
        "I do.",
    ),
    "two calls": (f"{HARMONY_CALL}<|start|>assistant{HARMONY_CALL}", "", MADE * 2, ""),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_channels_are_reasoning_text_and_calls_in_every_api(site: Site, api: str, streamed: bool) -> None:
    before, site.text.calls = site.text.calls, "harmony"
    for name, (written, text, calls, thought) in HARMONY.items():
        site.say(written)
        for per_step in (1, 1000):
            site.door.per_step = per_step
            said = await APIS[api].ask(site, streamed, None)
            assert (said.text, said.calls, said.thought) == (text, calls, thought), name
            assert said.ended == APIS[api].ended[bool(calls)], name
    site.text.calls = before


@in_turns("form", "api", full=1, one_in=2)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_stop_strings_are_looked_for_in_the_text_of_an_answer_alone(
    site: Site, form: str, api: str, streamed: bool
) -> None:
    call = CALLS[form]
    site.say(f"<think>\nHm, a.py.\n</think>\n\nI write.\n{call}\nThen a.py, and more.")
    said = await APIS[api].ask(site, streamed, "a.py")
    assert (said.thought, said.calls) == ("Hm, a.py.", MADE)
    assert said.text.rstrip() == "I write.Then"
    assert (said.ended, said.stop) == (APIS[api].ended[1], None)
    site.say(f"<think>\nHm, a.py.\n</think>\n\nIn a.py.\n{call}")
    said = await APIS[api].ask(site, streamed, "a.py")
    assert (said.thought, said.text.strip(), said.calls) == ("Hm, a.py.", "In", [])
    assert said.ended == APIS[api].stopped
    assert said.stop == ("a.py" if api == "messages" else None)
    site.say(f"{call}")
    said = await APIS[api].ask(site, streamed, call[-6:])
    assert (said.text, said.calls, said.ended) == ("", MADE, APIS[api].ended[1])


async def test_an_answer_that_is_cut_off_in_a_call_says_so_and_has_valid_arguments(site: Site, form: str) -> None:
    tokens = site.say(CALLS[form])
    tools = [{"type": "function", "function": FUNCTION}]
    for most in range(1, len(tokens), 3):
        response = await site.chat(tools=tools, max_tokens=most)
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            path = json.loads(call["function"]["arguments"])["path"]
            assert "a.py\n</".startswith(path) or "a.py</".startswith(path)
