"""Anthropic's Messages API over a socket, by Anthropic's own client where that sends what is to be tested."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from adapters.http.apis.anthropic_messages import read_messages
from adapters.http.request.tool_definitions import SkippedTools
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ChatMessage, ToolCall, ToolChoice
from tests.http.conftest import Site, served
from tests.lazy_module import LazyModule
from tests.plain_http import NO_TLS

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = LazyModule("anthropic")

PATH = "/v1/messages"
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<think>\nHm, so.\n</think>\n\nLet me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(site: Site) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(site) as client:
        yield client


def client_of(site: Site) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=str(site.client.base_url),
        api_key="any",
        max_retries=0,
        timeout=20,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=NO_TLS),
    )


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "max_tokens": 200, "messages": HI, **fields}


async def test_a_message_is_answered(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.say("Hello there.")
    message = await client.messages.create(**asked(system="Be brief."))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello there."}]
    assert "citations" not in str(message.to_dict()), "the Vercel AI SDK takes it for an array, or not at all"
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert "timings" not in message.to_dict(), "Anthropic's API has none; the object `rekindle` has times"
    prompt = site.door.tickets[-1].job.prompt
    assert message.usage.input_tokens == len(prompt)
    assert message.usage.output_tokens == len(site.text.tokenizer.encode_now(["Hello there."])[0]) + 1
    assert message.id.startswith("msg_")
    assert message._request_id == message.id  # noqa: SLF001 - how the SDK tells it
    again = await client.messages.create(**asked(system="Be brief."))
    usage = again.usage
    assert usage.cache_read_input_tokens == (len(prompt) - 1) // 4 * 4
    assert usage.input_tokens + usage.cache_read_input_tokens + (usage.cache_creation_input_tokens or 0) == len(prompt)


async def test_what_is_kept_of_a_prompt_is_said_to_be_written(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.door.selection = site.door.selection.__class__("full", "whole", rows=8)
    usage = (await client.messages.create(**asked())).usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (8, 0)
    assert usage.input_tokens == len(site.door.tickets[-1].job.prompt) - 8


async def test_a_call_comes_as_a_block_and_its_result_goes_back(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.say(CALL)
    message = await client.messages.create(**asked(tools=[ADD]))
    thinking, text, call = message.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert (thinking.thinking, text.text, call.name, call.input) == ("Hm, so.", "Let me add.", "add", {"a": 1})
    assert thinking.signature
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    site.say("2")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "two"}]}
    turns = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    last = await client.messages.create(**asked(messages=turns, tools=[ADD]))
    assert last.content[0].text == "2"
    written = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in written
    assert "<tool_response>\ntwo\n</tool_response>" in written


async def test_a_stream_adds_up_to_the_whole_answer(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.say(CALL)
    whole = await client.messages.create(**asked(tools=[ADD]))
    async with client.messages.stream(**asked(tools=[ADD])) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"text", "thinking", "signature", "input_json"} < set(kinds)
    assert [shown(block) for block in final.content] == [shown(block) for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    usage = final.usage.cache_read_input_tokens + final.usage.input_tokens
    assert usage == len(site.door.tickets[-1].job.prompt)
    assert final.usage.output_tokens == whole.usage.output_tokens


def shown(block: Any) -> dict[str, Any]:
    """All but the ids."""
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "signature") and value}


async def test_the_events_are_anthropics_in_their_order(site: Site) -> None:
    site.say(CALL)
    events = await frames(site, asked(tools=[ADD]))
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    names = [name for name, data in events if name not in ("ping", "content_block_delta")]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    starts = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    indices = [data["index"] for _, data in events if "index" in data]
    assert indices == sorted(indices)
    pieces = [data["delta"].get("partial_json", "") for name, data in events if name == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"a": 1}
    assert events[0][1]["message"]["usage"]["input_tokens"] == len(site.door.tickets[-1].job.prompt)


async def frames(site: Site, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    response = await site.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = [frame.split("\n", 1) for frame in response.text.split("\n\n") if frame]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


async def test_why_an_answer_ended(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.say("one two three four")
    cut = await client.messages.create(**asked(max_tokens=2))
    assert cut.stop_reason == "max_tokens"
    stopped = await client.messages.create(**asked(stop_sequences=["three"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text == "one two "
    site.say_tokens([50] * 5000)
    full = await client.messages.create(**asked(max_tokens=100_000))
    assert full.stop_reason == "model_context_window_exceeded"


async def test_a_prompt_is_only_read_where_no_token_is_asked_for(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.say("Hello.")
    message = await client.messages.create(**asked(max_tokens=0))
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    async with client.messages.stream(**asked(max_tokens=0)) as stream:
        final = await stream.get_final_message()
    assert (final.content, final.stop_reason) == ([], "max_tokens")
    assert final.usage.cache_read_input_tokens


async def test_a_call_whose_end_is_missing_has_the_input_that_is_there(
    site: Site, client: anthropic.AsyncAnthropic
) -> None:
    site.say('<tool_call>\n{"name": "add", "arguments": {"a": 1')
    message = await client.messages.create(**asked(tools=[ADD]))
    assert [(block.name, block.input) for block in message.content] == [("add", {"a": 1})]
    assert message.stop_reason == "tool_use"


async def test_a_prefilled_answer_goes_on(site: Site, client: anthropic.AsyncAnthropic) -> None:
    await client.messages.create(**asked(messages=[*HI, {"role": "assistant", "content": "My name is"}]))
    written = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)
    assert written.endswith("<|im_start|>assistant\nMy name is")


async def test_an_empty_answer_at_the_end_is_one_that_begins(site: Site, client: anthropic.AsyncAnthropic) -> None:
    await client.messages.create(**asked())
    plain = site.door.tickets[-1].job.prompt
    for content in ("", " \n", []):
        await client.messages.create(**asked(messages=[*HI, {"role": "assistant", "content": content}]))
        assert site.door.tickets[-1].job.prompt == plain


async def test_a_conversation_that_began_elsewhere_goes_on_without_what_tools_left_there(site: Site) -> None:
    server = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
    text = {"type": "text", "text": "It is so."}
    plain, more = ([*HI, {"role": "assistant", "content": blocks}, *HI] for blocks in ([text], [server, found, text]))
    prompts = []
    for messages in (plain, more):
        assert (await site.post(PATH, asked(messages=messages))).status_code == 200
        prompts.append(site.door.tickets[-1].job.prompt)
    assert prompts[0] == prompts[1]


async def test_tokens_are_counted_exactly(site: Site, client: anthropic.AsyncAnthropic) -> None:
    said = {"messages": HI, "system": [{"type": "text", "text": "Be brief."}], "tools": [ADD]}
    count = await client.messages.count_tokens(model="small", **said)
    await client.messages.create(**asked(**said))
    assert count.input_tokens == len(site.door.tickets[-1].job.prompt)


async def test_where_cache_control_stands_changes_no_token(site: Site, client: anthropic.AsyncAnthropic) -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    prompts = []
    for index in (0, 1):
        blocks = [{**block, **(marked if index == at else {})} for at, block in enumerate(system)]
        turns = [{"role": "user", "content": [{"type": "text", "text": "Hi", **(marked if index else {})}]}]
        await client.messages.create(**asked(system=blocks, messages=turns, tools=[{**ADD, **marked}]))
        prompts.append(site.door.tickets[-1].job.prompt)
    assert prompts[0] == prompts[1]


async def test_where_cache_control_stands_is_a_safe_boundary(site: Site, client: anthropic.AsyncAnthropic) -> None:
    marked = {"type": "text", "text": "You are an agent of many words.", "cache_control": {"type": "ephemeral"}}
    jobs = []
    for day in ("Monday", "Tuesday"):
        await client.messages.create(**asked(system=[marked, {"type": "text", "text": day}]))
        jobs.append(site.door.tickets[-1].job)
    openings = site.text.openings.find_boundaries(jobs[0].prompt)
    (cut,) = set(jobs[0].boundaries) - set(openings)
    assert cut in jobs[1].boundaries
    assert jobs[0].prompt[:cut] == jobs[1].prompt[:cut]
    assert site.text.tokenizer.decode(jobs[0].prompt[:cut], special=True).endswith("of many words.")


async def test_what_claude_code_sends_is_taken(site: Site) -> None:
    """Its fields, a system message between the others, tools of Anthropic's own, headers of its own."""
    body = asked(
        max_tokens=32_000,
        messages=[*HI, {"role": "system", "content": "Mind the date."}, {"role": "user", "content": "Go on"}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "a-client"},
        tools=[ADD, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        temperature=1,
    )
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "a,b",
        "x-api-key": "any",
        "accept": "application/json",
    }
    response = await site.client.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.json()["id"]
    assert response.headers["x-rekindle-tools-left-out"] == "web_search_20250305"
    written = site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)
    assert "Mind the date." in written
    assert "web_search" not in written


async def test_where_calls_are_not_read_the_answer_says_so(folder: Any) -> None:
    async with served(folder) as site:
        site.text.calls = "none"
        for path, tool in ((PATH, ADD), ("/v1/responses", {**ADD, "type": "function", "parameters": {}})):
            response = await site.post(path, {**asked(), "input": "Hi", "tools": [tool]})
            assert response.status_code == 200, response.text
            assert response.headers["x-rekindle-tools"].startswith("unparsed")


async def test_errors_reach_the_client_as_its_own(site: Site, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"\$\.messages: must be an array of at least one"):
        await client.messages.create(**asked(messages=[]))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        await client.messages.create(**asked(messages=[{"role": "user", "content": "quick brown " * 4000}]))
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**asked(model="other"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    site.door.fail_after = 0
    with pytest.raises(anthropic.InternalServerError) as failed:
        await client.messages.create(**asked())
    assert failed.value.request_id == failed.value.body["request_id"]
    assert failed.value.body["error"]["type"] == "api_error"


async def test_an_error_in_the_middle_is_an_event(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.door.fail_after = 3
    with pytest.raises(anthropic.APIStatusError, match="could not finish"):
        async with client.messages.stream(**asked()) as stream:
            await stream.until_done()


async def test_a_server_that_is_busy_or_stops_says_when_to_come_again(site: Site) -> None:
    site.door.state = "draining"
    response = await site.post(PATH, asked())
    assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
    assert response.headers["retry-after"]


async def test_a_full_queue_is_a_rate_limit_with_the_time_to_come_again(folder: Any) -> None:
    busy = {"slots": 1, "max_queue": 0, "go": anyio.Event()}
    async with served(folder, door=busy) as full, anyio.create_task_group() as tasks:
        tasks.start_soon(full.post, PATH, asked())
        while not full.door.busy:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        response = await full.post(PATH, asked())
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        tasks.cancel_scope.cancel()


async def test_the_models_are_listed_for_its_client_too(site: Site, client: anthropic.AsyncAnthropic) -> None:
    listed = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name) for model in listed] == [("small", "model", "small")]
    assert (await client.models.retrieve("small")).id == "small"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"


async def test_who_leaves_is_cancelled(site: Site, client: anthropic.AsyncAnthropic) -> None:
    site.door.step_s = 0.01
    async with client.messages.stream(**asked(max_tokens=2000)) as stream:
        async for event in stream:
            if event.type == "content_block_delta":
                break
    with anyio.fail_after(60):
        while site.door.busy:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert site.door.tickets[-1].reason == "client_gone"


async def test_a_long_prefill_is_full_of_pings(folder: Any) -> None:
    async with served(folder, door={"chunk_s": 0.03}, keepalive_s=0.01) as slow:
        events = await frames(slow, asked(messages=[{"role": "user", "content": "Hello, world! " * 30}]))
        assert [name for name, _ in events[:4]] == ["message_start", "ping", "ping", "ping"]
        shown = await frames(slow, asked(messages=[{"role": "user", "content": "Hello! " * 50}], return_progress=True))
        reports = [data["prompt_progress"] for name, data in shown if "prompt_progress" in data]
        assert reports[0]["processed"] == reports[0]["cache"]
        assert reports[-1]["processed"] == reports[-1]["total"]
        client = client_of(slow)
        async with client, client.messages.stream(**asked(), extra_body={"return_progress": True}) as stream:
            assert isinstance(await stream.get_final_message(), anthropic.types.Message)


async def test_a_very_long_prefill_has_events_that_clients_count(folder: Any) -> None:
    """Claude Code sees no pings, and ends a stream without anything else after five minutes."""
    body = asked(messages=[{"role": "user", "content": "Hello, world! " * 30}])
    async with served(folder, door={"chunk_s": 0.03}, keepalive_s=0.01, sign_of_life_s=0.05) as slow:
        slow.say("Hello there.")
        events = await frames(slow, body)
        before = [data for _, data in events[: [name for name, _ in events].index("content_block_start")]]
        life = [data for data in before if data["type"] == "message_delta"]
        assert life
        assert all(data["delta"]["stop_reason"] is None for data in life)
        assert [data["type"] for data in before].count("ping") > 2 * len(life)
        client = client_of(slow)
        async with (
            client,
            client.messages.stream(**asked(messages=[{"role": "user", "content": "Well! " * 60}])) as stream,
        ):
            final = await stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [{"type": "text", "text": "Hello there."}]
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens > 0


# -- readers, by table


def block(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


def said(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HI, {"role": "assistant", "content": list(blocks)}, *HI]


USE = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": -1}, "$.max_tokens", "an integer >= 0"),
    ({"max_tokens": "5"}, "$.max_tokens", 'not "5"'),
    ({"stop_sequences": "abc"}, "$.stop_sequences", "an array"),
    ({"stop_sequences": [""]}, "$.stop_sequences[0]", "non-empty"),
    ({"temperature": 3}, "$.temperature", "[0, 2]"),
    ({"top_p": 2}, "$.top_p", "a number"),
    ({"top_k": "many"}, "$.top_k", "an integer"),
    ({"metadata": {"user_id": 5}}, "$.metadata.user_id", "a string"),
    ({"metadata": 5}, "$.metadata", "an object"),
    ({"service_tier": 5}, "$.service_tier", "a string"),
    ({"stream": "yes"}, "$.stream", "true or false"),
    ({"mcp_servers": [{"url": "x"}]}, "$.mcp_servers", "not supported"),
    ({"container": {"skills": []}}, "$.container", "not supported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "$.output_config.format.schema", "an object, the JSON"),
    ({"output_config": {"effort": "most"}}, "$.output_config.effort", "one of"),
    ({"thinking": {"type": "deep"}}, "$.thinking.type", "one of"),
    ({"thinking": {}}, "$.thinking.type", "one of"),
    ({"thinking": {"type": "enabled"}}, "$.thinking.budget_tokens", "an integer >= 1"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "$.thinking.budget_tokens", ">= 1"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "$.thinking.budget_tokens", "below max_tokens"),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "$.thinking.display", "one of"),
    ({"system": 5}, "$.system", "a string or an array of blocks"),
    ({"system": [{"type": "image"}]}, "$.system[0].type", "reads text only"),
    ({"messages": None}, "$.messages", "at least one message"),
    ({"messages": ["hi"]}, "$.messages[0]", "an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "$.messages[0].role", "one of"),
    ({"messages": [{"content": "x"}]}, "$.messages[0].role", "one of"),
    ({"messages": [{"role": "user"}]}, "$.messages[0].content", "a string or an array"),
    ({"messages": [{"role": "user", "content": [5]}]}, "$.messages[0].content[0]", "an object"),
    ({"messages": block(type="text")}, "$.messages[0].content[0].text", "a string"),
    (
        {"messages": block(type="text", text="x", cache_control=5)},
        "$.messages[0].content[0].cache_control",
        "an object",
    ),
    ({"messages": block(type="video")}, "$.messages[0].content[0].type", "one of 'text', 'tool_result'"),
    *[
        ({"messages": block(type=kind, source={})}, "$.messages[0].content[0].type", "reads text only")
        for kind in ("image", "document")
    ],
    ({"messages": block(type="tool_use", id="1", name="f", input={})}, "$.messages[0].content[0].type", "one of"),
    ({"messages": said(USE)[:-1]}, "$.messages[1].content", "ends with a tool_use"),
    ({"tools": {}}, "$.tools", "an array"),
    ({"tools": [{"name": "f"}]}, "$.tools[0].input_schema", "a JSON schema"),
    ({"tools": [{"input_schema": {}}]}, "$.tools[0].name", "letters"),
    ({"tools": [ADD, ADD]}, "$.tools[1]", "second function"),
    ({"tools": [{"type": 5}]}, "$.tools[0].type", "a string"),
    ({"tools": [ADD], "tool_choice": "any"}, "$.tool_choice", "an object"),
    ({"tools": [ADD], "tool_choice": {"type": "some"}}, "$.tool_choice.type", "one of"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "$.tool_choice.name", "none of the functions"),
    ({"tool_choice": {"type": "any"}}, "$.tool_choice", "but `tools` is empty"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "$.tool_choice.disable_parallel_tool_use",
        "true or false",
    ),
]


@pytest.mark.parametrize(("fields", "path", "why"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
async def test_a_wrong_field_is_named(shared: Site, fields: dict[str, Any], path: str, why: str) -> None:
    response = await shared.post(PATH, asked(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), response.text
    assert error["message"].startswith(f"{path}: ")
    assert why in error["message"]


@pytest.mark.parametrize(
    "body", [b"{bad", b"null", b'{"max_tokens": NaN}', b'{"a": "\\ud800"}', b"[" * 100_000 + b"]" * 100_000]
)
async def test_a_body_that_is_none_is_answered_in_anthropics_shape(shared: Site, body: bytes) -> None:
    response = await shared.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["type"]) == (400, "error")
    assert response.json()["error"]["message"].startswith("$")


def test_a_conversation_is_read_whole() -> None:
    body = {
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Well"},
                    {"type": "text", "text": "."},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"b": "ä", "a": 1.5}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "is_error": True},
                    {"type": "text", "text": "What"},
                    {"type": "text", "text": "now?"},
                ],
            },
        ],
        "tools": [ADD],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "max_tokens": 4000,
    }
    found = read_messages(Fields(body), SkippedTools())
    assert found.messages == [
        ChatMessage("system", "Be\nbrief."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "Well.", "Hm.", (ToolCall("1", "add", '{"b": "ä", "a": 1.5}'),)),
        ChatMessage("tool", "error", answered_call_id="1"),
        ChatMessage("user", "What\nnow?"),
    ]
    assert (found.choice, found.parallel) == (ToolChoice("function", "add"), False)
    assert found.variables == {"enable_thinking": True, "thinking": True, "thinking_budget": 2000}
    assert [tool.name for tool in found.tools] == ["add"]
