"""An agent's turns with a model that says anything its grammar allows: in each form of calls and in each API, streamed.

Every value is one of a few that the schema lists, and they are such that forms have to quote them. So it is known what
may arrive.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from adapters.text.answer.forms.harmony_calls import CONTROLS
from effects.job import Job
from tests.http.conftest import Site, served
from tests.http.sse import Reachable, stream
from tests.text import small
from tests.text.answer.forms.test_harmony import TEMPLATE
from tests.text.answer.test_detect import FORMS, template

GEMMA = """<|tool_call>call:{{ call.function.name }}{{ '{' }}
{%- for k, v in call.function.arguments | items %}{{ k }}:
{%- if v is string %}<|"|>{{ v }}<|"|>
{%- elif v is iterable %}[{% for one in v %}<|"|>{{ one }}<|"|>{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"""
# The tokens around messages are those of the small tokenizer.
SOURCES = {
    form: template(call).source.replace("<|head|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    for form, call in (FORMS | {"gemma4": GEMMA}).items()
    if form != "none"
} | {"harmony": TEMPLATE}
SOURCES["pythonic"] = SOURCES["pythonic"].replace(
    "{% endfor %})", "{% if not loop.last %}, {% endif %}{% endfor %})", 1
)
PATHS = ['a "b" \\c\\.txt', "<p>\n\u00e9\u4e2d \U0001f600</p>", "{'x': [1]}", " two  spaces "]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "enum": PATHS},
        "depth": {"type": "integer", "enum": [0, -7, 1234]},
        "ratio": {"type": "number", "enum": [0.5, 2, -1.25]},
        "force": {"type": "boolean"},
        "lines": {"type": "array", "items": {"type": "string", "enum": PATHS}},
        "options": {
            "type": "object",
            "properties": {"mode": {"type": "string", "enum": ["new", 'mo"re']}, "level": {"type": "null"}},
            "required": ["mode", "level"],
            "additionalProperties": False,
        },
    },
    "required": ["path", "depth", "ratio", "force", "lines", "options"],
    "additionalProperties": False,
}
OLDER = pytest.mark.long
LONG = ("hermes", "qwen-xml", "llama3-json", "pythonic", "mistral-json", "seed-xml")  # other tests have these, too
ASKED = "Write it."
RESULT = "It is written."
TOKENS = 3000


def speak(site: Site, seed: int, said: list[int]) -> None:
    """From now on every answer is a random one of those that its grammar allows. said: gets its tokens."""
    tokenizer = site.text.tokenizer
    controls = {control.id for control in tokenizer.controls.values()}

    def script(job: Job) -> Iterator[int]:
        assert job.sampling.grammar is not None
        draw = random.Random(seed)
        matching = site.text.grammars.match(job.sampling.grammar)
        while True:
            mask = matching.mask(())
            assert not isinstance(mask, str), mask
            allowed = [*np.unpackbits(mask, bitorder="little", count=tokenizer.size).nonzero()[0].tolist()]
            # Where the grammar allows any text, as in reasoning, one of the few special tokens ends it soon.
            special = [token for token in allowed if token in controls]
            token = draw.choice(special if special and draw.random() < 0.3 else allowed)
            if token in tokenizer.end_tokens:
                return
            matching.append((token,))
            said.append(token)
            yield token

    site.door.script = script


Call = tuple[str, str, str, str]  # the id, the name, the arguments as they were streamed, and the text before the call


async def ask_chat(site: Reachable, schema: dict[str, Any], call: Call | None = None, **fields: Any) -> Call | None:
    tool = {"name": "write", "parameters": schema, "strict": True}
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    if call is not None:
        function = {"name": call[1], "arguments": call[2]}
        messages += [
            {
                "role": "assistant",
                "content": call[3] or None,
                "tool_calls": [{"id": call[0], "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call[0], "content": RESULT},
        ]
    body = {"messages": messages, "tools": [{"type": "function", "function": tool}], "max_tokens": TOKENS}
    choice = {"tool_choice": "required" if call is None else "auto", "parallel_tool_calls": False}
    response, found = await stream(site, "/v1/chat/completions", body | choice | fields)
    assert response.status_code == 200, found
    chunks = [json.loads(event) for event in found if event != "[DONE]" and not event.startswith(":")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    pieces = [one for delta in deltas for one in delta.get("tool_calls", ())]
    if not pieces:
        return None
    text = "".join(delta.get("content") or "" for delta in deltas)
    arguments = "".join(one["function"]["arguments"] for one in pieces)
    return pieces[0]["id"], pieces[0]["function"]["name"], arguments, text


async def ask_responses(
    site: Reachable, schema: dict[str, Any], call: Call | None = None, **fields: Any
) -> Call | None:
    tool = {"type": "function", "name": "write", "parameters": schema, "strict": True}
    items: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    if call is not None:
        items += [{"role": "assistant", "content": call[3]}] if call[3] else []
        items += [
            {"type": "function_call", "call_id": call[0], "name": call[1], "arguments": call[2]},
            {"type": "function_call_output", "call_id": call[0], "output": RESULT},
        ]
    choice = {"tool_choice": "required" if call is None else "auto", "parallel_tool_calls": False}
    body = {"input": items, "tools": [tool], "max_output_tokens": TOKENS, **choice}
    response, found = await stream(site, "/v1/responses", body | fields)
    assert response.status_code == 200, found
    events = [json.loads(event) for event in found if event.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    done = [item for item in items if item["type"] == "function_call"]
    if not done:
        return None
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done[0]["arguments"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return done[0]["call_id"], done[0]["name"], "".join(deltas), text


async def ask_messages(site: Reachable, schema: dict[str, Any], call: Call | None = None, **fields: Any) -> Call | None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    if call is not None:
        use = {"type": "tool_use", "id": call[0], "name": call[1], "input": json.loads(call[2])}
        before = [{"type": "text", "text": call[3]}] if call[3] else []
        result = {"type": "tool_result", "tool_use_id": call[0], "content": RESULT}
        messages += [{"role": "assistant", "content": [*before, use]}, {"role": "user", "content": [result]}]
    tool = {"name": "write", "input_schema": schema, "strict": True}
    choice = {"type": "any", "disable_parallel_tool_use": True} if call is None else {"type": "auto"}
    body = {"messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": TOKENS}
    response, found = await stream(site, "/v1/messages", body | fields)
    assert response.status_code == 200, found
    events = [json.loads(event) for event in found if event.startswith("{")]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    used = [block for block in begun if block["type"] == "tool_use"]
    if not used:
        return None
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    text = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
    return used[0]["id"], used[0]["name"], arguments, text


def schema_of(form: str) -> dict[str, Any]:
    """Gemma's form holds no schemas of objects inside arguments."""
    if form != "gemma4":
        return SCHEMA
    properties = {name: one for name, one in SCHEMA["properties"].items() if name != "options"}
    return {**SCHEMA, "properties": properties, "required": [*properties]}


ASKS: tuple[Callable[..., Any], ...] = (ask_chat, ask_responses, ask_messages)


def contains(tokens: tuple[int, ...], part: list[int]) -> bool:
    return any(list(tokens[at : at + len(part)]) == part for at in range(len(tokens) - len(part) + 1))


def make_folder(folder: Path, source: str, controls: Sequence[str] = ()) -> Path:
    """Write a tokenizer that has these tokens as well, and a chat template."""
    small.write(folder, source)
    if controls:
        trained = small.train()
        trained.add_tokens([AddedToken(token, special=False, normalized=False) for token in controls])
        trained.save(str(folder / "tokenizer.json"))
    return folder


def make_form_folder(folder: Path, form: str) -> Path:
    return make_folder(folder, SOURCES[form], CONTROLS if form == "harmony" else ())


@pytest.mark.parametrize("form", [pytest.param(form, marks=OLDER if form in LONG else ()) for form in SOURCES])
async def test_arguments_arrive_as_the_model_says_them_and_go_back_so(form: str, tmp_path: Path) -> None:
    async with served(make_form_folder(tmp_path, form)) as site:
        assert site.text.calls == form
        schema = schema_of(form)
        arrived = []
        for ask in ASKS:
            said: list[int] = []
            speak(site, 3, said)
            call = await ask(site, schema)
            assert call is not None
            assert call[1] == "write"
            jsonschema.validate(json.loads(call[2]), schema)
            arrived.append(json.loads(call[2]))
            site.say("Well.")
            assert await ask(site, schema, call) is None
            prompt = site.door.tickets[-1].job.prompt
            if form == "harmony":  # its template writes the function's name before the channel, unlike the model
                assert json.dumps(arrived[-1], ensure_ascii=False) in site.text.tokenizer.decode(prompt)
            else:
                assert contains(prompt, said), "the next prompt has the call as it was said"
        assert arrived[0] == arrived[1] == arrived[2]
