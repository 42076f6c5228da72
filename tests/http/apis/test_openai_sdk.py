"""OpenAI's own Python SDK over a real socket: plain, streamed, its helpers, tools, errors, leaving."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.http.answer.test_tools import CALL, SECOND, TOOLS
from tests.http.conftest import Site
from tests.http.wire.test_lifecycle import until
from tests.lazy_module import LazyModule
from tests.plain_http import NO_TLS

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

SAID = "I look."
QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
async def sdk(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url=f"{site.client.base_url}/v1",
        max_retries=0,
        timeout=20,
        http_client=openai.DefaultAsyncHttpxClient(verify=NO_TLS),
    )
    async with client:
        yield client


async def test_plain(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say("Hello there")
    answer = await sdk.chat.completions.create(model="small", messages=QUESTION, max_completion_tokens=99)
    assert answer.choices[0].message.content == "Hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert [model.id async for model in sdk.models.list()] == ["small"]


async def test_what_openais_clients_send_beside_is_taken(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say("Hello")
    answer = await sdk.chat.completions.create(
        model="small",
        messages=QUESTION,
        metadata={"a": "b"},
        store=False,
        user="a-client",
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        verbosity="low",
        reasoning_effort="low",
        response_format={"type": "text"},
        n=2,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.service_tier == "default"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2


async def test_streamed_with_usage(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say("Hello there")
    chunks = [
        chunk
        async for chunk in await sdk.chat.completions.create(
            model="small", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices) == "Hello there"
    assert chunks[-1].usage is not None


async def test_the_stream_helper_puts_calls_together(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say(f"<think>\nHm.\n</think>\n\n{SAID}\n{CALL}\n{SECOND}")
    async with sdk.chat.completions.stream(model="small", messages=QUESTION, tools=TOOLS) as stream:  # type: ignore[arg-type]
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    done = [
        (event.index, event.name, event.arguments)
        for event in events
        if event.type == "tool_calls.function.arguments.done"
    ]
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == SAID
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "Hm."
    wanted = [("get_weather", '{"city": "Zürich"}'), ("add", '{"a": 1, "b": 2}')]
    assert done == [(index, *one) for index, one in enumerate(wanted)]
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == wanted


class Weather(BaseModel):
    city: str
    degrees: int


async def test_a_form_is_parsed_by_the_sdks_own_helpers(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say('{"city": "Zürich", "degrees": 21}')
    answer = await sdk.chat.completions.parse(model="small", messages=QUESTION, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Zürich", degrees=21)
    grammar = site.door.tickets[0].job.sampling.grammar
    assert grammar is not None
    assert "degrees" in grammar.source


async def test_tools_that_are_pydantic_models_come_back_as_such(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say('<tool_call>\n{"name": "Weather", "arguments": {"city": "Bonn", "degrees": 3}}\n</tool_call>')
    tool = openai.pydantic_function_tool(Weather)
    answer = await sdk.chat.completions.parse(model="small", messages=QUESTION, tools=[tool])
    (made,) = answer.choices[0].message.tool_calls or []
    assert made.function.parsed_arguments == Weather(city="Bonn", degrees=3)
    async with sdk.chat.completions.stream(model="small", messages=QUESTION, tools=[tool]) as stream:
        final = await stream.get_final_completion()
    (again,) = final.choices[0].message.tool_calls or []
    assert again.function.parsed_arguments == made.function.parsed_arguments


async def test_a_tool_loop(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say(CALL)
    first = await sdk.chat.completions.create(model="small", messages=QUESTION, tools=TOOLS)  # type: ignore[call-overload]
    message = first.choices[0].message
    (made,) = message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Zürich"}
    site.say("Rain.")
    result = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
    second = await sdk.chat.completions.create(model="small", messages=[*QUESTION, message, result], tools=TOOLS)  # type: ignore[call-overload]
    assert second.choices[0].message.content == "Rain."
    prompt = site.text.tokenizer.decode(site.door.tickets[1].job.prompt)
    assert CALL in prompt
    assert "<tool_response>\nrain\n" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "$.tools[0].function.name"),
        ({"temperature": 5}, "$.temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "$.messages[0].content[0].type"),
        ({"response_format": {"type": "json_schema"}}, "$.response_format.schema"),
    ],
)
async def test_errors_are_its_own(sdk: openai.AsyncOpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**{"model": "small", "messages": QUESTION, "stream": stream, **fields})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await sdk.chat.completions.create(model="another", messages=QUESTION)


async def test_a_failure_in_the_middle_of_a_stream_is_raised(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.say(CALL)
    site.door.fail_after = 30
    stream = await sdk.chat.completions.create(model="small", messages=QUESTION, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError, match="could not finish"):
        _ = [chunk async for chunk in stream]


async def test_whoever_leaves_ends_the_answer(site: Site, sdk: openai.AsyncOpenAI) -> None:
    site.door.step_s = 0.01
    site.say(CALL * 50)
    async with sdk.chat.completions.stream(model="small", messages=QUESTION, tools=TOOLS) as stream:  # type: ignore[arg-type]
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                break
    await until(lambda: site.door.tickets[0].closed)
    assert site.door.tickets[0].reason == "client_gone"
    site.door.step_s = 0
