"""Tool calls and reasoning in chat completions: read, asked for, sent back, streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from effects.job import Job
from tests.http.conftest import Site, chat, served
from tests.http.sse import chunks
from tests.text import small

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, ADD]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def deltas(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in found for choice in chunk["choices"] if choice["delta"]]


async def test_calls_are_told_apart_from_text(site: Site) -> None:
    site.say(f"I look.\n{CALL}\n{SECOND}")
    body = (await site.chat(tools=TOOLS)).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
        {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert calls[0]["id"] != calls[1]["id"]
    assert body["rekindle"]["tool_choice"] is None


@pytest.mark.parametrize("per_step", [1, 4, 100])
async def test_a_stream_says_a_calls_name_first_and_then_its_arguments(site: Site, per_step: int) -> None:
    site.say(f"I look.\n{CALL}\n{SECOND}")
    site.door.per_step = per_step
    found = await chunks(site, PATH, chat(tools=TOOLS))
    said = deltas(found)
    assert said[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in said) == "I look."
    pieces = [piece for delta in said for piece in delta.get("tool_calls", [])]
    for index, (name, arguments) in enumerate([("get_weather", '{"city": "Zürich"}'), ("add", '{"a": 1, "b": 2}')]):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert first == {
            "index": index,
            "id": first["id"],
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert all(
            piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"} for piece in rest
        )
        assert all(piece["function"]["arguments"] for piece in rest)
        assert "".join(piece["function"]["arguments"] for piece in rest) == arguments
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    assert found[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}


async def test_every_choice_has_calls_of_its_own(site: Site) -> None:
    said = iter([site.say(CALL), site.say(SECOND)])

    def script(job: Job) -> Iterator[int]:
        yield from next(said)

    site.door.script = script
    found = await chunks(site, PATH, chat(tools=TOOLS, n=2))
    pieces = [
        (choice["index"], piece)
        for chunk in found
        for choice in chunk["choices"]
        for piece in choice["delta"].get("tool_calls", [])
    ]
    names = sorted(piece["function"]["name"] for _, piece in pieces if "name" in piece["function"])
    assert names == ["add", "get_weather"]
    assert {index for index, _ in pieces} == {0, 1}
    assert {piece["index"] for _, piece in pieces} == {0}


# As agents were seen to send them: OpenCode 1.18 and pi 0.73, less their long texts.
OPENCODE = {
    "model": "small",
    "max_tokens": 32000,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Read a.txt"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": TOOLS,
}
PI = {
    "model": "small",
    "stream": True,
    "stream_options": {"include_usage": True},
    "store": False,
    "max_completion_tokens": 32000,
    "reasoning_effort": "medium",
    "messages": [
        {"role": "developer", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "Read a.txt"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ],
    "tools": [WEATHER, {**ADD, "function": {**ADD["function"], "strict": False}}],  # type: ignore[dict-item]
}


@pytest.mark.parametrize("body", [OPENCODE, PI], ids=["opencode", "pi"])
async def test_what_agents_send_is_taken_as_it_is(site: Site, body: dict[str, Any]) -> None:
    site.say(CALL)
    found = await chunks(site, PATH, body)
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert found[-1]["usage"]["completion_tokens"] > 0
    job = site.door.tickets[0].job
    assert job.max_tokens == site.options.model.max_ctx - len(job.prompt)
    prompt = site.text.tokenizer.decode(job.prompt)
    assert "system\nYou are an agent." in prompt
    assert "<tool_response>\n3\n" in prompt


async def test_an_answer_of_nothing_but_a_call_has_no_content(site: Site) -> None:
    site.say(CALL)
    message = (await site.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_a_broken_call_is_text_and_no_call(site: Site) -> None:
    site.say('So: <tool_call>\n{"nome": "add"}\n</tool_call>')
    for stream_ in (False, True):
        if stream_:
            found = await chunks(site, PATH, chat(tools=TOOLS))
            said, finish = "".join(delta.get("content", "") for delta in deltas(found)), found[-1]["choices"][0]
        else:
            finish = (await site.chat(tools=TOOLS)).json()["choices"][0]
            said = finish["message"]["content"]
        assert said == 'So: <tool_call>\n{"nome": "add"}\n</tool_call>'
        assert finish["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_says_length(site: Site) -> None:
    tokens = site.say(CALL)
    choice = (await site.chat(tools=TOOLS, max_tokens=len(tokens) - 8)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    (made,) = choice["message"]["tool_calls"]
    assert "Zürich".startswith(json.loads(made["function"]["arguments"])["city"])


@pytest.mark.parametrize("stop", ["rich", "</tool_call>", "get_weather"])
async def test_stop_strings_are_not_looked_for_in_calls(site: Site, stop: str) -> None:
    site.say(f"{CALL}\n{SECOND}")
    choice = (await site.chat(tools=TOOLS, stop=stop)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "add"]
    found = await chunks(site, PATH, chat(tools=TOOLS, stop=stop))
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_where_nothing_may_be_called_all_is_text(site: Site, fields: dict[str, Any]) -> None:
    site.say(CALL)
    choice = (await site.chat(**fields)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = site.text.tokenizer.decode(site.door.tickets[0].job.prompt)
    assert "get_weather" not in prompt


async def test_one_call_ends_the_answer_where_they_may_not_be_parallel(site: Site) -> None:
    one = len(site.say(CALL))
    site.say(f"{CALL}\n{SECOND}")
    body = (await site.chat(tools=TOOLS, parallel_tool_calls=False)).json()
    (choice,) = body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] <= one
    assert site.door.tickets[0].reason == "stop_string"


async def test_the_prompt_shows_tools_calls_and_results(site: Site) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bonn"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "rain"}]},
    ]
    site.say("Rain.")
    assert (await site.post(PATH, {"messages": messages, "tools": TOOLS})).status_code == 200
    prompt = site.text.tokenizer.decode(site.door.tickets[0].job.prompt, special=True)
    shown = {key: WEATHER["function"][key] for key in ("name", "description", "parameters")}  # type: ignore[index]
    assert json.dumps({"type": "function", "function": shown}) in prompt
    assert '\n<tool_call>\n{"name": "get_weather", "arguments": {"city":"Bonn"}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


def allowed(mode: str) -> dict[str, Any]:
    """One of two functions."""
    listed = [{"type": "function", "function": {"name": "add"}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


async def test_the_prompt_has_all_tools_whichever_are_allowed(site: Site) -> None:
    """So that it stays the same from turn to turn."""
    for choice in ("auto", allowed("auto"), allowed("required")):
        await site.chat(tools=TOOLS, tool_choice=choice)
    prompts = [ticket.job.prompt for ticket in site.door.tickets]
    assert prompts == [prompts[0]] * 3
    assert len({ticket.job.sampling.grammar for ticket in site.door.tickets}) == 3, "what may be said is not"


@pytest.mark.parametrize(
    ("choice", "said", "kept"),
    [
        ("required", CALL, "kept"),
        ("required", "No.", "not_kept"),
        ({"type": "function", "function": {"name": "add"}}, SECOND, "kept"),
        ({"type": "function", "function": {"name": "add"}}, CALL, "not_kept"),
        ("auto", "No.", None),
        (allowed("auto"), "No.", "kept"),
        (allowed("auto"), SECOND, "kept"),
        (allowed("auto"), CALL, "not_kept"),
        (allowed("required"), SECOND, "kept"),
        (allowed("required"), "No.", "not_kept"),
    ],
)
async def test_an_answer_says_whether_it_keeps_to_the_choice(site: Site, choice: Any, said: str, kept: str) -> None:
    site.say(said)
    assert (await site.chat(tools=TOOLS, tool_choice=choice)).json()["rekindle"]["tool_choice"] == kept
    found = await chunks(site, PATH, chat(tools=TOOLS, tool_choice=choice))
    assert found[-1]["rekindle"]["tool_choice"] == kept


async def test_the_next_turn_of_a_tool_conversation_goes_on_from_the_last(site: Site) -> None:
    """The client sends the conversation back. It is rendered to the tokens that were there, and to those that were
    generated.
    """
    said = f"I look.\n{CALL}\n{SECOND}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    answers = iter([site.say(said), site.say("Rain.")])

    def script(job: Job) -> Iterator[int]:
        yield from next(answers)

    site.door.script = script
    message = (await site.post(PATH, {"messages": messages, "tools": TOOLS})).json()["choices"][0]["message"]
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]
    await site.post(PATH, {"messages": messages, "tools": TOOLS})
    first, second = (ticket.job.prompt for ticket in site.door.tickets)
    (spoken,) = site.text.tokenizer.encode_now([said], controls=True)
    assert second[: len(first) + len(spoken)] == (*first, *spoken)


async def test_an_answer_can_go_on_with_the_last_message(site: Site) -> None:
    site.say("fox jumps.")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The quick brown "}]
    body = (await site.post(PATH, {"messages": messages, "continue_final_message": True})).json()
    assert body["choices"][0]["message"]["content"] == "fox jumps."
    prompt = site.text.tokenizer.decode(site.door.tickets[0].job.prompt, special=True)
    assert prompt.endswith("<|im_start|>assistant\nThe quick brown")


async def test_props_tell_how_answers_are_read(shared: Site) -> None:
    props = (await shared.client.get("/props")).json()
    assert (props["tool_parser"], props["reasoning_parser"]) == ("hermes", "think")


async def test_how_many_tokens_a_conversation_has(site: Site) -> None:
    body = chat(tools=TOOLS, model="small")
    counted = (await site.post(f"{PATH}/input_tokens", body)).json()
    assert not site.door.tickets
    await site.post(PATH, {**body, "max_tokens": 1})
    assert counted == {"object": "response.input_tokens", "input_tokens": len(site.door.tickets[0].job.prompt)}
    wrong = await site.post(f"{PATH}/input_tokens", {"messages": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "$.messages")


# --- reasoning


async def test_reasoning_comes_apart_from_the_answer_and_is_counted(site: Site) -> None:
    site.say("<think>\nHm, so.\n</think>\n\nYes.")
    body = (await site.chat()).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "Yes.")
    (thought,) = site.text.tokenizer.encode_now(["\nHm, so.\n"])
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(thought) <= counted < body["usage"]["completion_tokens"] - 1
    found = await chunks(site, PATH, chat(stream_options={"include_usage": True}))
    assert "".join(delta.get("reasoning_content", "") for delta in deltas(found)) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas(found)) == "Yes."
    assert found[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted


async def test_logprobs_are_of_every_token_also_of_those_that_are_no_text(site: Site) -> None:
    tokens = site.say(f"<think>\nHm.\n</think>\n\nSo.\n{CALL}")
    whole = (await site.chat(tools=TOOLS, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["id"] for entry in whole] == tokens
    found = await chunks(site, PATH, chat(tools=TOOLS, logprobs=True))
    streamed = [
        entry for chunk in found for one in chunk["choices"] for entry in (one.get("logprobs") or {}).get("content", [])
    ]
    assert streamed == whole


async def test_reasoning_is_sent_back_to_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
        "{{ reasoning_effort }}{% endif %}"
    )
    async with served(small.write(tmp_path, template)) as site:
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
            {"role": "user", "content": "So?"},
        ]
        site.say("More.\n</think>\n\nNo.")
        opened = (await site.post(PATH, {"messages": messages})).json()["choices"][0]["message"]
        assert (opened["reasoning_content"], opened["content"]) == ("More.", "No.")
        prompt = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt)
        assert "assistant\n<think>\nHm.\n</think>\n\nYes." in prompt
        half = [*messages[:1], {"role": "assistant", "content": "", "reasoning_content": "Hm, I"}]
        site.say(" think.\n</think>\n\nYes.")
        going = {"messages": half, "continue_final_message": True}
        went = (await site.post(PATH, going)).json()["choices"][0]["message"]
        assert (went["reasoning_content"], went["content"]) == ("think.", "Yes.")
        for fields, end in (
            ({}, "<think>\n"),
            ({"reasoning_effort": "none"}, "assistant\nnone"),
            ({"reasoning_effort": "low"}, "<think>\nlow"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "assistant\n"),
            ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "assistant\nhigh"),
        ):
            await site.post(PATH, {"messages": messages, "max_tokens": 1, **fields})
            assert site.text.tokenizer.decode(site.door.tickets[-1].job.prompt).endswith(end)
