"""OpenAI's Responses API over a socket, by OpenAI's own client where that sends what is to be tested."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from adapters.http.apis import openai_responses
from adapters.http.apis.openai_response_items import open_sealed_text, seal_text
from adapters.http.apis.openai_responses import ItemReferences, read_conversation
from adapters.http.edge_options import EdgeModel, EdgeOptions, RequestLimits
from adapters.http.history import response_store as archive
from adapters.http.history.response_store import ResponseFolder, ResponseStore, StoredResponse
from adapters.http.request.custom_tools import encode_custom_arguments, extract_custom_input
from adapters.http.request.tool_definitions import SkippedTools
from adapters.http.wire.errors import ApiError
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ChatMessage, ToolCall, ToolChoice
from tests.http.conftest import Site, served
from tests.lazy_module import LazyModule
from tests.plain_http import NO_TLS

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
CALL = '<think>\nHm, so.\n</think>\n\nLet me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(site) as client:
        yield client


def client_of(site: Site) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{site.client.base_url}/v1",
        api_key="any",
        max_retries=0,
        timeout=20,
        http_client=openai.DefaultAsyncHttpxClient(verify=NO_TLS),
    )


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "input": "Hi", **fields}


def prompt_of(site: Site) -> str:
    return site.text.tokenizer.decode(site.door.tickets[-1].job.prompt, special=True)


async def test_a_response_is_given(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say("Hello there.")
    response = await client.responses.create(**asked(instructions="Be brief.", metadata={"a": "b"}, user="me"))
    assert response.output_text == "Hello there."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "me")
    usage, prompt = response.usage, site.door.tickets[-1].job.prompt
    assert usage is not None
    assert usage.input_tokens == len(prompt)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert response._request_id == response.id  # noqa: SLF001 - how the SDK tells it
    assert "Be brief." in prompt_of(site)
    again = await client.responses.create(**asked(instructions="Be brief."))
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == (len(prompt) - 1) // 4 * 4


async def test_a_response_says_only_what_it_was_told_of_its_user(site: Site) -> None:
    body = (await site.post(PATH, asked(user=None, reasoning={"summary": "none"}, service_tier="flex"))).json()
    assert not {"user", "prompt_cache_key", "safety_identifier"} & body.keys()
    assert (body["reasoning"]["summary"], body["service_tier"]) == ("none", "default")


INCLUDED: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize(
    "said", ["Hello \u00e4 \U0001f600.", f"{CALL}\nSo, there.", "<think>\nHm.\n</think>\n\nYes: <tool_x"]
)
async def test_logprobs_are_of_the_tokens_of_the_text(
    site: Site, client: openai.AsyncOpenAI, said: str, per_step: int
) -> None:
    site.say(said)
    site.door.per_step = per_step
    whole = await client.responses.create(**asked(tools=[ADD], include=INCLUDED, top_logprobs=2))
    assert whole.top_logprobs == 2
    values = []
    for item in whole.output:
        if item.type == "message":
            (part,) = item.content
            assert part.type == "output_text"
            assert part.logprobs is not None
            assert b"".join(bytes(one.bytes) for one in part.logprobs).decode().strip() == part.text
            assert {len(one.top_logprobs) for one in part.logprobs} == {2}
            values.append([one.to_dict() for one in part.logprobs])
    assert values
    events = await frames(site, asked(tools=[ADD], include=INCLUDED, top_logprobs=2))
    streamed: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            streamed.setdefault(event["output_index"], []).extend(event["logprobs"])
        if event["type"] == "response.output_text.done":
            assert event["logprobs"] == streamed[event["output_index"]]
    assert [*streamed.values()] == values
    without = await client.responses.create(**asked(tools=[ADD]))
    assert site.door.tickets[-1].job.sampling.logprobs == -1
    assert without.output_text == whole.output_text


async def test_a_tool_loop_by_response_ids(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say(CALL)
    response = await client.responses.create(**asked(tools=[ADD]))
    reasoning, message, call = response.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert reasoning.content[0].text == "Hm, so."
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    site.say("2")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "two"}
    last = await client.responses.create(model="small", previous_response_id=response.id, input=[result], tools=[ADD])
    assert (last.output_text, last.previous_response_id) == ("2", response.id)
    by_id = prompt_of(site)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in by_id
    assert "<tool_response>\ntwo\n</tool_response>" in by_id
    items = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in response.output], result]
    await client.responses.create(model="small", input=items, tools=[ADD], store=False)
    assert prompt_of(site) == by_id, "what is sent again is what was kept"
    references = [{"type": "item_reference", "id": item.id} for item in response.output]
    turns = [{"role": "user", "content": "Hi"}, *references, result]
    await client.responses.create(model="small", input=turns, tools=[ADD], store=False)
    assert prompt_of(site) == by_id, "so is what an id names"


async def test_a_stream_adds_up_to_the_whole_response(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say(CALL)
    whole = await client.responses.create(**asked(tools=[ADD]))
    async with client.responses.stream(**asked(tools=[ADD])) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [shown(item) for item in final.output] == [shown(item) for item in whole.output]
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    parsed = final.output[-1]
    assert parsed.type == "function_call"
    assert json.loads(parsed.arguments) == {"a": 1}


def shown(item: Any) -> dict[str, Any]:
    values = item.model_dump(exclude_none=True)
    return {name: value for name, value in values.items() if name not in ("id", "call_id", "parsed_arguments")}


async def test_the_events_are_openais_in_their_order(site: Site) -> None:
    site.say(CALL)
    events = await frames(site, asked(tools=[ADD]))
    kinds = [event["type"] for event in events if not event["type"].endswith(".delta")]
    text = ["content_part.added", "output_text.done", "content_part.done"]
    thought = ["content_part.added", "reasoning_text.done", "content_part.done"]
    call = ["function_call_arguments.done"]
    items = [["output_item.added", *inner, "output_item.done"] for inner in (thought, text, call)]
    wanted = ["created", "in_progress", *items[0], *items[1], *items[2], "completed"]
    assert kinds == [f"response.{kind}" for kind in wanted]
    assert events[0]["response"]["output"] == []
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, item in enumerate(done):
        deltas = [
            event["delta"]
            for event in events
            if event.get("item_id") == item["id"] and event["type"].endswith(".delta")
        ]
        assert "".join(deltas) == (item["arguments"] if index == 2 else item["content"][0]["text"])
        assert {event.get("output_index") for event in events if event.get("item_id") == item["id"]} == {index}


async def frames(site: Site, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await site.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = [frame.split("\n", 1) for frame in response.text.split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [event["type"] for event in events]
    return events


async def test_an_answer_that_is_cut_off_is_incomplete(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say("one two three four")
    cut = await client.responses.create(**asked(max_output_tokens=2))
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[-1].status == "incomplete"
    events = await frames(site, asked(max_output_tokens=2))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"
    await client.responses.create(**asked())
    assert site.door.tickets[-1].job.max_tokens == 4096 - len(site.door.tickets[-1].job.prompt)


async def test_what_codex_sends_is_taken(site: Site) -> None:
    """Items with ids, tools of kinds that are not here, functions in a namespace, sealed reasoning."""
    server = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [{**ADD, "name": "open"}]}
    site.say('<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "mcp__files__open", "arguments": {"a": 1}}\n</tool_call>')
    body = {
        "model": "small",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "id": "1", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "id": "2", "content": [{"type": "input_text", "text": "Do it."}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
        "tools": [
            ADD,
            server,
            {"type": "web_search"},
            {"type": "mcp", "server_label": "x"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
        "service_tier": "priority",
    }
    events = await frames(site, body)
    reasoning, call = events[-1]["response"]["output"]
    assert (call["namespace"], call["name"]) == ("mcp__files", "open")
    assert open_sealed_text(reasoning["encrypted_content"]) == "Hm."
    assert "Rules." in prompt_of(site)
    assert "mcp__files__open" in prompt_of(site)
    assert "web_search" not in prompt_of(site)
    values = {name: reasoning[name] for name in ("type", "id", "summary", "encrypted_content")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "text of it"}
    response = await site.post(PATH, {**body, "input": [*body["input"], values, call, result]})
    assert response.status_code == 200, response.text
    assert response.headers["x-rekindle-tools-left-out"] == "web_search mcp"
    assert '{"name": "mcp__files__open", "arguments": {"a": 1}}' in prompt_of(site)


async def test_a_custom_tool_is_called_with_text(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say('<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+ \\"x\\""}}\n</tool_call>')
    tool = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
    async with client.responses.stream(**asked(tools=[tool])) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("patch", '*** Begin\n+ "x"')
    kinds = [event.type for event in events[2:-1]]
    deltas = ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    assert kinds == ["response.output_item.added", *deltas, "response.output_item.done"]
    assert events[3].delta == events[4].input == call.input
    whole = await client.responses.create(**asked(tools=[tool]))
    assert whole.output[0].input == call.input
    result = {"type": "custom_tool_call_output", "call_id": whole.output[0].call_id, "output": "done"}
    await client.responses.create(model="small", previous_response_id=whole.id, input=[result], tools=[tool])
    assert '{"name": "patch", "arguments": {"input": "*** Begin\\n+ \\"x\\""}}' in prompt_of(site)


@pytest.mark.parametrize("arguments", ['{"input": 5}', "[1]", '{"inp', ""])
def test_what_a_custom_tool_is_called_with_is_never_lost(arguments: str) -> None:
    assert extract_custom_input(arguments) == arguments
    assert extract_custom_input(encode_custom_arguments(arguments)) == arguments


async def test_tokens_are_counted_exactly(site: Site, client: openai.AsyncOpenAI) -> None:
    count = await client.responses.input_tokens.count(**asked(instructions="Be brief.", tools=[ADD]))
    await client.responses.create(**asked(instructions="Be brief.", tools=[ADD]))
    assert count.input_tokens == len(site.door.tickets[-1].job.prompt)


async def test_responses_are_shown_listed_and_deleted(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say("Hello.")
    items = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    response = await client.responses.create(**asked(input=items))
    assert (await client.responses.retrieve(response.id)).to_dict() == response.to_dict()
    listed = await client.responses.input_items.list(response.id, limit=2, order="asc")
    assert [item.content for item in listed.data] == ["one", "two"]
    assert [item.content async for item in listed] == ["one", "two", "three"]
    assert (await site.client.get(f"/responses/{response.id}/")).json()["id"] == response.id
    with pytest.raises(openai.BadRequestError, match="'completed'; only one that is in progress"):
        await client.responses.cancel(response.id)
    deleted = await site.client.delete(f"{PATH}/{response.id}")
    assert deleted.json() == {"id": response.id, "object": "response", "deleted": True}
    hidden = await client.responses.create(**asked(store=False))
    for name in (response.id, hidden.id, "resp_x", "../../etc/passwd"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(name)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as gone:
        await client.responses.create(**asked(previous_response_id=hidden.id))
    assert gone.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("limit=0", "limit"),
        ("limit=000000001" + "0" * 5000, "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ],
)
async def test_a_list_is_asked_for_rightly(site: Site, query: str, why: str) -> None:
    name = (await site.post(PATH, asked(max_output_tokens=1))).json()["id"]
    response = await site.client.get(f"{PATH}/{name}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, why)


async def test_a_response_that_is_being_answered_can_be_cancelled(site: Site, client: openai.AsyncOpenAI) -> None:
    site.door.step_s = 0.01
    stream = await client.responses.create(**asked(max_output_tokens=2000), stream=True)
    events: list[Any] = []
    values = False
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and not values:
            values = True
            name = events[0].response.id
            assert (await client.responses.retrieve(name)).status == "in_progress"
            assert (await client.responses.cancel(name)).status == "cancelled"
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "cancelled")
    assert site.door.tickets[-1].reason == "client_gone"
    kept = await client.responses.retrieve(events[0].response.id)
    assert (kept.status, kept.output[0].status) == ("cancelled", "incomplete")


async def test_a_conversation_goes_on_after_a_restart(folder: Path, tmp_path: Path) -> None:
    async with served(folder, kept=tmp_path) as before:
        before.say("My name is Ada.")
        async with client_of(before) as client:
            first = await client.responses.create(**asked())
            second = await client.responses.create(**asked(input="And?", previous_response_id=first.id))
    async with served(folder, kept=tmp_path) as after, client_of(after) as client:
        assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
        await client.responses.create(**asked(input="So?", previous_response_id=second.id))
        assert prompt_of(after).count("My name is Ada.") == 2
        assert prompt_of(after).index("And?") < prompt_of(after).index("So?")


async def test_what_was_asked_is_written_out_beside_the_event_loop(
    site: Site, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be as large as a body, and every other answer waits for the loop."""
    written, encode = list[tuple[bool, int]](), archive.ENCODER.encode

    class Noted:
        @staticmethod
        def encode(value: Any) -> bytes:
            written.append((isinstance(value, list), threading.get_ident()))
            return encode(value)

    for module in (archive, openai_responses):
        monkeypatch.setattr(module, "ENCODER", Noted)
    made = await client.responses.create(**asked(input=[{"role": "user", "content": "x" * 100}], max_output_tokens=4))
    lists = [thread for is_list, thread in written if is_list]
    assert len(lists) == 1
    assert threading.get_ident() not in lists
    listed = await client.responses.input_items.list(made.id)
    assert listed.data[0].content == "x" * 100


async def test_a_response_is_its_callers_alone(folder: Path) -> None:
    async with served(folder, api_keys=("one", "two"), door={"step_s": 0.01}) as site:
        ours, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = (await site.post(PATH, asked(max_output_tokens=1), headers=ours)).json()["id"]
        assert (await site.client.get(f"{PATH}/{made}", headers=ours)).status_code == 200
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            response = await site.client.request(method, f"{PATH}/{made}{path}", headers=theirs)
            assert response.status_code == 404
        more = await site.post(PATH, asked(previous_response_id=made), headers=theirs)
        assert more.json()["error"]["code"] == "previous_response_not_found"
        body = asked(max_output_tokens=500, stream=True)
        async with site.client.stream("POST", PATH, json=body, headers=ours) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    running = json.loads(line[6:])["response"]["id"]
                    break
            assert (await site.client.post(f"{PATH}/{running}/cancel", headers=theirs)).status_code == 404
            assert (await site.client.post(f"{PATH}/{running}/cancel", headers=ours)).status_code == 200


async def test_errors_reach_the_client(site: Site, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(**asked(input="quick brown " * 4000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(**asked(model="other"))
    site.door.fail_after = 3
    events = await frames(site, asked())
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(events[-1])
    site.door.fail_after = None
    site.door.state = "draining"
    response = await site.post(PATH, asked())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_who_leaves_is_cancelled(site: Site, client: openai.AsyncOpenAI) -> None:
    site.door.step_s = 0.01
    stream = await client.responses.create(**asked(max_output_tokens=2000), stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    with anyio.fail_after(60):
        while site.door.busy:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert site.door.tickets[-1].reason == "client_gone"


async def test_a_long_prefill_is_full_of_events(folder: Path) -> None:
    async with served(folder, door={"chunk_s": 0.03}, keepalive_s=0.01) as slow:
        events = await frames(slow, asked(input="Hello, world! " * 30))
        kinds = [event["type"] for event in events[:5]]
        assert kinds == ["response.created", *["response.in_progress"] * 4]
        values = await frames(slow, asked(input="Hello! " * 50, return_progress=True))
        reports = [event["prompt_progress"] for event in values if "prompt_progress" in event]
        assert reports[0]["processed"] == reports[0]["cache"]
        assert reports[-1]["processed"] == reports[-1]["total"]
        long = await frames(slow, asked(input="Hello! " * 50, instructions="Be brief. " * 50, return_progress=True))
        brief = [event["response"] for event in long if "prompt_progress" in event]
        assert len(brief) > 2
        assert all(one["status"] == "in_progress" and "instructions" not in one for one in brief)
        assert {one["id"] for one in brief} == {long[0]["response"]["id"]}
        slow.say("Done.")
        async with client_of(slow) as client, client.responses.stream(**asked(input="Hello! " * 60)) as stream:
            assert (await stream.get_final_response()).status == "completed"


# -- readers, by table


def items(*more: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "Hi"}, *more]}


MADE = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "$.input", "a string or an array of items"),
    ({"input": 5}, "$.input", "a string or an array of items"),
    ({"input": []}, "$.input", "at least one message"),
    ({"input": ["hi"]}, "$.input[0]", "an object"),
    ({"input": [{}]}, "$.input[0].type", "one of"),
    ({"input": [{"role": "tool", "content": "x"}]}, "$.input[0].role", "one of"),
    ({"input": [{"type": "message", "content": "x"}]}, "$.input[0].role", "one of"),
    ({"input": [{"role": "user"}]}, "$.input[0].content", "a string or an array"),
    ({"input": [{"role": "user", "content": [5]}]}, "$.input[0].content[0]", "an object"),
    ({"input": [{"role": "user", "content": [{"type": "verse"}]}]}, "$.input[0].content[0].type", "'input_text'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "$.input[0].content[0].text", "a string"),
    *[
        ({"input": [{"role": "user", "content": [{"type": kind}]}]}, "$.input[0].content[0].type", "reads text only")
        for kind in ("input_image", "input_file", "input_audio")
    ],
    (items({"type": "item_reference", "id": "msg_x"}), "$.input[1].id", "no item 'msg_x' here"),
    (items({"type": "item_reference"}), "$.input[1].id", "a string"),
    (items(MADE), "$.input", "ends with a call"),
    ({"instructions": ["x"]}, "$.instructions", "a string"),
    ({"previous_response_id": "resp_1"}, "$.previous_response_id", "no longer kept here"),
    ({"previous_response_id": 5}, "$.previous_response_id", "a string"),
    ({"max_output_tokens": 0}, "$.max_output_tokens", "an integer >= 1"),
    ({"max_output_tokens": "5"}, "$.max_output_tokens", 'not "5"'),
    ({"temperature": 3}, "$.temperature", "[0, 2]"),
    ({"stream": "yes"}, "$.stream", "true or false"),
    ({"store": "yes"}, "$.store", "true or false"),
    ({"parallel_tool_calls": 1}, "$.parallel_tool_calls", "true or false"),
    ({"truncation": "some"}, "$.truncation", "one of"),
    ({"background": True}, "$.background", "not supported"),
    ({"conversation": "conv_1"}, "$.conversation", "use `previous_response_id`"),
    ({"prompt": {"id": "pmpt_1"}}, "$.prompt", "not supported"),
    ({"top_logprobs": 21}, "$.top_logprobs", "from 0 to 20"),
    ({"include": ["everything"]}, "$.include[0]", "one of"),
    ({"include": "all"}, "$.include", "an array"),
    ({"metadata": {"a": 5}}, "$.metadata.a", "a string"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "$.metadata", "at most 16 keys"),
    ({"reasoning": {"effort": "most"}}, "$.reasoning.effort", "one of"),
    ({"reasoning": {"summary": "long"}}, "$.reasoning.summary", "one of"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "$.text.format.schema", "an object, the JSON schema"),
    ({"text": {"format": {"type": "poem"}}}, "$.text.format.type", "one of"),
    ({"text": {"format": {}}}, "$.text.format.type", "one of"),
    ({"text": {"verbosity": "much"}}, "$.text.verbosity", "one of"),
    ({"tools": {}}, "$.tools", "an array"),
    ({"tools": [{"name": "f"}]}, "$.tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "$.tools[0].name", "letters"),
    ({"tools": [{**ADD, "parameters": []}]}, "$.tools[0].parameters", "an object"),
    ({"tools": [ADD, ADD]}, "$.tools[1]", "second function"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "$.tools[0].tools[0].name",
        "letters",
    ),
    ({"tools": [ADD], "tool_choice": "some"}, "$.tool_choice", "'none', 'auto', 'required'"),
    ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "$.tool_choice", "of type 'function'"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
        "$.tool_choice.name",
        "none of the functions",
    ),
    ({"tool_choice": "required"}, "$.tool_choice", "but `tools` is empty"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "$.tool_choice.mode", "'auto' or 'required'"),
    (
        {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
        "$.tool_choice.tools",
        "none of the functions",
    ),
]


@pytest.mark.parametrize(("fields", "path", "why"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
async def test_a_wrong_field_is_named(shared: Site, fields: dict[str, Any], path: str, why: str) -> None:
    response = await shared.post(PATH, asked(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", path), response.text
    assert why in error["message"]


def test_items_are_read_into_messages() -> None:
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
            {"type": "web_search_call", "id": "ws_1"},
            MADE,
            {**MADE, "call_id": "2", "namespace": "n", "arguments": '{"b":1}'},
            {"type": "custom_tool_call", "call_id": "3", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "custom_tool_call_output", "call_id": "3", "output": "three"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": "%%"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [ADD],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none"},
    }
    find = ItemReferences(ResponseFolder(ResponseStore()), EdgeOptions(EdgeModel("small", 4096, 500)))
    found, offered = read_conversation(Fields(body), [], find, SkippedTools())
    calls = (ToolCall("1", "add", "{}"), ToolCall("2", "n__add", '{"b":1}'), ToolCall("3", "patch", '{"input": "x"}'))
    assert found.messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("system", "Rules."),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "Well.", "Hm.", calls),
        ChatMessage("tool", "one", answered_call_id="1"),
        ChatMessage("tool", "two", answered_call_id="2"),
        ChatMessage("tool", "three", answered_call_id="3"),
        ChatMessage("assistant", "No.", "So."),
        ChatMessage("user", "Go on."),
    ]
    assert (found.choice, found.parallel, offered.namespaces) == (ToolChoice("function", "add"), False, {})
    assert found.variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}


async def test_what_every_response_says_again_is_bounded(site: Site) -> None:
    """A stream says it three times, and once more every five seconds."""
    site.say("Hello.")
    large = "x" * (4 << 20)
    for fields in (
        {"tools": [{"type": "web_search", "note": large}]},
        {"text": {"format": {"type": "text"}, "note": large}},
        {"user": large},
        {"tool_choice": {"type": "function", "name": "add", "note": large}},
    ):
        response = await site.post(PATH, asked(**fields))
        assert response.status_code == 400
        assert "every response would repeat" in response.json()["error"]["message"]
    items = [{"role": "user", "content": "Hi"}, {"type": "web_search_call", "note": large}]
    assert (await site.post(PATH, asked(input=items))).status_code == 200


def test_an_item_counts_each_time_that_it_is_named() -> None:
    """65,536 ids of one answer with 128 KiB would be a message of 8 GiB."""
    name, archive = "resp_" + 24 * "0", ResponseStore()
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 1000}]}
    archive.store(name, "", StoredResponse({"output": [said]}, []))
    find = ItemReferences(
        ResponseFolder(archive), EdgeOptions(EdgeModel("small", 4096, 500), limits=RequestLimits(10_000))
    )
    found = [find(f"msg_{24 * '0'}0000") for _ in range(20)]
    assert found[:5] == [said] * 5
    assert found[-1] is None
    named = {"type": "item_reference", "id": f"msg_{24 * '0'}0000"}
    with pytest.raises(ApiError, match="send the item itself"):
        read_conversation(Fields({"input": [named] * 20}), [], find, SkippedTools())


@pytest.mark.parametrize("text", ["", "Hm.", "größer 😀\n"])
def test_what_is_sealed_is_opened_again(text: str) -> None:
    assert open_sealed_text(seal_text(text)) == text
