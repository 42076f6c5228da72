"""Summaries of conversations, by /v1/responses/compact and by a trigger, and what goes on from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from adapters.http.apis.openai_compaction import INSTRUCTION, retain_user_messages
from adapters.http.apis.openai_items_as_text import SUMMARY, open_summary
from tests.http.apis.test_responses import ADD, client_of, frames, prompt_of
from tests.http.conftest import Site
from tests.lazy_module import LazyModule

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

PATH = "/v1/responses"
TRIGGER = {"type": "compaction_trigger"}
USER = {"role": "user", "content": "Add one and two."}
CALL = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "three"}
SAID = {"role": "assistant", "content": "It is three."}
HISTORY: list[Any] = [USER, CALL, RESULT, SAID]
THOUGHT = "<think>\nHm, so.\n</think>\n\n"


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(site) as client:
        yield client


async def test_a_conversation_is_compacted_and_goes_on(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say(f"{THOUGHT}They added numbers.")
    found = await client.responses.compact(model="small", input=HISTORY, instructions="Be brief.")
    assert (found.object, found.usage.total_tokens > 0) == ("response.compaction", True)
    user, summary = [item.to_dict(warnings=False) for item in found.output]  # its type is an answer's
    assert (user["role"], user["content"]) == ("user", [{"type": "input_text", "text": "Add one and two."}])
    assert summary["type"] == "compaction"
    assert open_summary(summary["encrypted_content"]) == "They added numbers."
    assert INSTRUCTION in prompt_of(site)
    assert "Be brief." in prompt_of(site)
    site.say("Four.")
    again: list[Any] = [user, summary, {"role": "user", "content": "And one more?"}]
    assert (await client.responses.create(model="small", input=again)).output_text == "Four."
    assert f"{SUMMARY}They added numbers." in prompt_of(site)
    assert "It is three." not in prompt_of(site)


async def test_a_summary_goes_on_from_what_the_cache_has(site: Site) -> None:
    await site.post(PATH, {"input": HISTORY, "tools": [ADD]})
    asked = prompt_of(site)
    site.say('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
    answer = await site.post(f"{PATH}/compact", {"input": HISTORY, "tools": [ADD], "tool_choice": "required"})
    assert prompt_of(site).startswith(asked.removesuffix("<|im_start|>assistant\n"))
    text = open_summary(answer.json()["output"][-1]["encrypted_content"])
    assert text is not None
    assert text.startswith("<tool_call>"), "nothing is called"


async def test_what_is_kept_is_compacted_by_its_id(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say("First.")
    first = await client.responses.create(model="small", input="One?")
    site.say("A summary.")
    found = await client.responses.compact(model="small", previous_response_id=first.id)
    assert [item.type for item in found.output] == ["message", "compaction"]
    assert "First." in prompt_of(site)
    gone = await site.client.get(f"{PATH}/{found.id}")
    assert gone.status_code == 404


@pytest.mark.parametrize("said", ["They added.", f"{THOUGHT}They added.", "<think>\nThey added."])
async def test_a_trigger_streams_one_summary(site: Site, said: str) -> None:
    """Codex expects exactly one such item in a response that is completed."""
    site.say(said)
    events = await frames(site, {"input": [*HISTORY, TRIGGER], "tools": [ADD]})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    (summary,) = [item for item in done if item["type"] == "compaction"]
    assert open_summary(summary["encrypted_content"]) == "They added."
    assert summary["id"].startswith("cmp_")
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][-1] == summary
    kinds = [event["type"] for event in events]
    assert "response.output_text.delta" not in kinds
    whole = (await site.post(PATH, {"input": [*HISTORY, TRIGGER], "tools": [ADD]})).json()
    assert whole["output"][-1]["encrypted_content"] == summary["encrypted_content"]


async def test_a_summary_that_is_cut_off_is_one_all_the_same(site: Site) -> None:
    site.say("They added numbers, and then some more of them.")
    events = await frames(site, {"input": [*HISTORY, TRIGGER], "max_output_tokens": 3})
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.completed", "completed")


async def test_a_kept_conversation_goes_on_from_its_summary(site: Site, client: openai.AsyncOpenAI) -> None:
    site.say("They added.")
    compacted = await client.responses.create(model="small", input=[*HISTORY, TRIGGER])
    site.say("Five.")
    await client.responses.create(model="small", input="Go on.", previous_response_id=compacted.id)
    prompt = prompt_of(site)
    assert "Add one and two." in prompt
    assert f"{SUMMARY}They added." in prompt
    assert "It is three." not in prompt
    assert INSTRUCTION not in prompt


async def test_a_call_without_its_output_may_be_summarized(site: Site) -> None:
    assert (await site.post(f"{PATH}/compact", {"input": [USER, CALL]})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "$.input", None),
        ({"input": []}, "$.input", None),
        ({"input": 5}, "$.input", None),
        ({"input": "a b " * 1600}, "$.input", "context_length_exceeded"),
        ({"previous_response_id": "resp_1"}, "$.previous_response_id", "previous_response_not_found"),
    ],
)
async def test_what_cannot_be_compacted_is_told(
    shared: Site, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = await shared.post(f"{PATH}/compact", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert code in (None, error["code"])


def test_the_newest_messages_of_the_user_are_retained() -> None:
    listed = [{"role": "user", "content": str(number)} for number in range(100)]
    found = retain_user_messages([*listed, SAID, {"role": "user"}, 5], 1000)
    texts = [item["content"][0]["text"] for item in found if item["content"]]
    assert texts == [str(number) for number in range(100 - len(texts), 100)]
    assert 3 < len(texts) < 10
