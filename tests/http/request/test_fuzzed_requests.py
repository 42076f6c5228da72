"""Tests with random values in the fields of requests: the answer is an error that names a place in the request, or
there is no error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.http.apis.anthropic_messages import read_message_controls, read_messages
from adapters.http.apis.openai_chat import read_chat_controls
from adapters.http.apis.openai_chat import read_conversation as read_conversation_of_chat
from adapters.http.apis.openai_items_as_text import seal_summary
from adapters.http.apis.openai_responses import FIELD_NAMES, ItemReferences, make_echo, read_conversation
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history.response_store import ResponseFolder, ResponseStore
from adapters.http.request.controls import read_controls
from adapters.http.request.tool_definitions import SkippedTools
from adapters.http.wire.errors import ApiError
from adapters.http.wire.fields import Fields
from adapters.text.conversation import Conversation, build_template_variables
from adapters.text.model_text import Text

OPTIONS = EdgeOptions(EdgeModel("small", 4096, 500))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGES = {
    "model": "small",
    "max_tokens": 4000,
    "system": [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2", "is_error": False}]},
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}, {"type": "web_search_20250305"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "me"},
    "stop_sequences": ["x"],
    "stream": True,
}
RESPONSES = {
    "model": "small",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "1", "name": "add", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "local_shell_call", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "shell_call_output", "call_id": "2", "output": [{"stdout": "a", "outcome": {"exit_code": 1}}]},
        {"type": "apply_patch_call", "call_id": "3", "operation": {"type": "update_file", "path": "a", "diff": "+"}},
        {"type": "apply_patch_call_output", "call_id": "3", "status": "failed", "output": "no"},
        {"type": "compaction", "encrypted_content": seal_summary("They said hi.")},
    ],
    "tools": [
        {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
        {
            "type": "custom",
            "name": "edit",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'},
        },
        {"type": "web_search", "name": "search"},
    ],
    "logit_bias": [["x", -1], [5, False]],
    "tool_choice": {"type": "function", "name": "add"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "truncation": "auto",
    "max_output_tokens": 5,
}
FUNCTION = {"name": "add", "arguments": "{}"}
CHAT = {
    "model": "small",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": FUNCTION},
                {"id": "2", "type": "custom", "custom": {"name": "edit", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        {"role": "assistant", "content": "Well.", "function_call": FUNCTION},
        {"role": "function", "name": "add", "content": "3"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
        {
            "type": "custom",
            "custom": {
                "name": "edit",
                "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "x+"}},
            },
        },
    ],
    "functions": [],
    "function_call": "auto",
    "reasoning_effort": "max",
    "logit_bias": {"x": 1, "5": -1},
    "service_tier": "flex",
    "top_logprobs": 2,
    "logprobs": True,
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
WORDS_OF_OTHERS = st.sampled_from(["text", "tool_result", "tool_use", "message", "item_reference", "image", "function"])


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from iterate_paths(inner, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    copy = deepcopy(body)
    *way, last = path
    inner: Any = copy
    for key in way:
        inner = inner[key]
    inner[last] = junk
    return copy


def read_message_request(fields: Fields, text: Text) -> Conversation:
    read_message_controls(fields, OPTIONS, text)
    return read_messages(fields, SkippedTools())


def read_response_request(fields: Fields, text: Text) -> Conversation:
    make_echo(fields, read_controls(fields, FIELD_NAMES, OPTIONS, text.tokenizer))
    return read_conversation(fields, [], ItemReferences(ResponseFolder(ResponseStore()), OPTIONS), SkippedTools())[0]


@pytest.fixture(scope="session")
def text(folder: Any) -> Text:
    return Text.load(folder)


def read_chat_request(fields: Fields, text: Text) -> Conversation:
    read_chat_controls(fields, OPTIONS, text)
    return read_conversation_of_chat(fields, text)


READERS = {
    "chat": (CHAT, read_chat_request),
    "messages": (MESSAGES, read_message_request),
    "responses": (RESPONSES, read_response_request),
}


@pytest.mark.parametrize(("body", "read"), READERS.values(), ids=READERS)
@given(data=st.data())
def test_a_field_with_anything_in_it_is_read_or_named(
    text: Text, body: dict[str, Any], read: Callable[[Fields, Text], Conversation], data: st.DataObject
) -> None:
    assert read(Fields(body), text).messages
    path = data.draw(st.sampled_from([*iterate_paths(body)]))
    fields = Fields(changed(body, path, data.draw(JUNK | WORDS_OF_OTHERS)))
    refused: ApiError | None = None
    try:
        json.dumps(build_template_variables(read(fields, text), argument_text=False))
    except ApiError as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        assert refused.param is not None
        assert refused.param.startswith("$")
