"""POST /v1/chat/completions and its token counter: read a conversation strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio

from adapters.http.apis.api import Api, TokenCounter
from adapters.http.apis.openai_chat_answer import ChatDetails, ChatShape
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.controls import ApiFieldNames, Controls, read_controls, read_salt
from adapters.http.request.custom_tools import INPUT, read_custom_tool
from adapters.http.request.legacy_functions import read_function_choice, read_functions, uses_functions
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.request.render_prompt import build_request, check_template, make_template_headers, render_chat_prompt
from adapters.http.request.resent_history import (
    MOST_NAME,
    UNNAMED_CALL,
    ResentHistory,
    Speaker,
    extract_document_text,
    find_newest_user_turn,
    read_speaker_name,
)
from adapters.http.request.tool_definitions import (
    CHOICES,
    MAX_TOOLS,
    OFFERED_TYPES,
    SkippedTools,
    check_tools,
    choose_function,
    read_allowed,
    read_function,
    read_name,
    read_plain_choice,
)
from adapters.http.request.unsupported import UNSUPPORTED_IN_CHAT
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.conversation import (
    ChatMessage,
    Conversation,
    FunctionTool,
    Role,
    ToolChoice,
    build_thinking_variables,
)
from adapters.text.model_text import Text
from adapters.text.reasoning_efforts import EFFORTS
from effects.ids import Tokens

MAX_LOGPROBS = 20
MAX_MESSAGES = 1 << 16
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEMPLATE_FLAGS = ("enable_thinking", "thinking", "preserve_thinking")
NOT_TEXT = ("image_url", "input_image", "image", "input_audio", "audio", "file", "input_file", "video_url", "video")
FIELD_NAMES = ApiFieldNames(UNSUPPORTED_IN_CHAT)


async def read_request(
    fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient
) -> ParsedRequest[ChatDetails]:
    controls = read_chat_controls(fields, options, text)
    turns = caller.find_turns(controls.salt)
    # There may be tens of thousands of messages, so they are read on a worker thread.
    skipped = SkippedTools()
    conversation = await anyio.to_thread.run_sync(read_conversation, fields, text, skipped)
    prompt = await render_chat_prompt(conversation, fields, text, options, caller.has_left, turns=turns)
    details = ChatDetails(list_custom_tools(conversation.tools), uses_functions(fields))
    headers = {**skipped.headers, **make_template_headers(conversation, text)}
    return build_request(controls, prompt, [fields.path_of("messages")], headers, turns, details=details)


def read_chat_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        raise invalid(fields.path_of("top_logprobs"), "needs `logprobs: true`")
    controls = read_controls(fields, FIELD_NAMES, options, text.tokenizer, (top or 0) if wanted else -1)
    modalities = fields.items("modalities", 8)
    if modalities is not None and modalities != ["text"]:
        raise fields.wrong_value("modalities", '["text"]; this server answers with text only')
    return controls


def read_conversation(fields: Fields, text: Text, skipped: SkippedTools | None = None) -> Conversation:
    """Read the conversation. Raises ApiError naming the message and part that is wrong. skipped: records what was
    changed.
    """
    check_template(text)
    history = ResentHistory() if skipped is None else ResentHistory(skipped.changes)
    history.changes.note(*fields.repairs)
    listed = fields.items("messages", MAX_MESSAGES)
    if not listed:
        raise invalid(fields.path_of("messages"), "must be an array of at least one message")
    newest = find_newest_user_turn([guess_speaker(value) for value in listed])
    messages: list[ChatMessage] = []
    for index, value in enumerate(listed):
        message = Fields.from_value(value, f"{fields.path_of('messages')}[{index}]")
        messages.append(read_user(message) if index == newest else read_message(message, history))
    tools = read_tools(fields)
    history.changes.note_names(tool.client_name for tool in tools)
    return Conversation(
        messages,
        tools,
        read_choice(fields, tools),
        fields.flag("parallel_tool_calls", True) and not uses_functions(fields),
        read_variables(fields),
        fields.flag("add_generation_prompt", True),
        read_continuation(fields, messages[-1]),
    )


def read_continuation(fields: Fields, last: ChatMessage) -> bool:
    """Return whether the answer continues the last message, as vLLM and transformers have it."""
    if not fields.flag("continue_final_message"):
        return False
    if last.role != "assistant" or last.calls or not (last.content or last.reasoning).strip():
        raise invalid(
            fields.path_of("continue_final_message"), "needs a last message of the assistant that is not empty"
        )
    if fields.data.get("add_generation_prompt") is True:
        raise invalid(
            fields.path_of("continue_final_message"), "continues a message, so add_generation_prompt must be left out"
        )
    return True


def guess_speaker(value: Any) -> Speaker:
    """Return the speaker of a message that was not read yet. An unknown role is read as the user's."""
    role = value.get("role") if isinstance(value, dict) else None
    return ROLES.get(role, "user") if isinstance(role, str) else "user"


def read_user(message: Fields) -> ChatMessage:
    """Read the newest turn of the user, strictly."""
    role = message.choice("role", ROLES)
    if role is None:
        raise message.wrong_value("role", "one of " + ", ".join(map(repr, ROLES)))
    content = read_content(message)
    if content is None:
        raise message.wrong_value("content", "a string or an array of text parts")
    return ChatMessage("user", content, name=message.text("name", MOST_NAME))


def read_message(message: Fields, history: ResentHistory) -> ChatMessage:
    """Read any other message, as far as possible."""
    role = history.read_role(message.data.get("role"), ROLES)
    data = message.data
    content = data.get("content")
    name = data.get("name")
    if role == "tool":
        return history.read_result(data.get("tool_call_id"), history.read_text(content, "\n"), name)
    history.begin_message()
    if role != "assistant":
        return ChatMessage(role, history.read_text(content, "\n"), name=read_speaker_name(name))
    said = content if content is not None else data.get("refusal") or ""
    calls = [history.read_call(*call) for call in list_calls(data)]
    texts = [history.read_text(said, "\n"), *(UNNAMED_CALL for call in calls if call is None)]
    made = tuple(call for call in calls if call is not None)
    reasoning = data.get(message.first_present("reasoning_content", "reasoning"))
    thought = reasoning if isinstance(reasoning, str) else ""
    return ChatMessage("assistant", "\n".join(filter(None, texts)), thought, made, name=read_speaker_name(name))


def read_content(message: Fields) -> str | None:
    content = message.data.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise message.wrong_value("content", "a string or an array of text parts")
    texts = []
    for index, value in enumerate(content):
        part = Fields.from_value(value, f"{message.path_of('content')}[{index}]")
        kind = part.data.get("type")
        if (text := extract_document_text(part.data)) is not None:
            texts.append(text)
            continue
        if isinstance(kind, str) and kind in NOT_TEXT:
            raise invalid(
                part.path_of("type"), f"{kind!r} parts are not supported: this server's model reads text only"
            )
        if kind not in ("text", "refusal"):
            raise part.wrong_value("type", "'text'")
        piece = part.text(kind)
        if piece is None:
            raise part.wrong_value(kind, "a string")
        texts.append(piece)
    return "\n".join(texts)


def list_calls(message: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield id, name and arguments of a message's calls: of functions, of custom tools, or in the legacy form."""
    listed = message.get("tool_calls")
    for value in listed if isinstance(listed, list) else ():
        call = value if isinstance(value, dict) else {}
        function = call.get("function")
        custom = call.get("custom")
        if isinstance(custom, dict):
            yield call.get("id"), custom.get("name"), {"input": custom.get("input")}
        elif isinstance(function, dict):
            yield call.get("id"), function.get("name"), function.get("arguments")
        else:
            yield None, None, None
    legacy = message.get("function_call")
    if isinstance(legacy, dict) and not listed:
        yield None, legacy.get("name"), legacy.get("arguments")


def read_tools(fields: Fields) -> tuple[FunctionTool, ...]:
    tools = [*read_functions(fields)]
    for index, value in enumerate(fields.items("tools", MAX_TOOLS) or []):
        tool = Fields.from_value(value, f"{fields.path_of('tools')}[{index}]")
        kind = tool.choice("type", OFFERED_TYPES)
        if kind is None:
            raise tool.wrong_value("type", "'function' or 'custom'")
        function = tool.read_object(kind)
        if function is None:
            raise tool.wrong_value(kind, "an object")
        tools.append(read_custom_tool(function) if kind == "custom" else read_function(function))
    return check_tools(tools, fields.path_of("functions" if uses_functions(fields) else "tools"))


def list_custom_tools(tools: Sequence[FunctionTool]) -> frozenset[str]:
    """Return the names of the tools that are called with text."""
    return frozenset(tool.name for tool in tools if tool.parameters is INPUT)


def read_choice(fields: Fields, tools: tuple[FunctionTool, ...]) -> ToolChoice:
    if not fields.has("tool_choice") and (legacy := read_function_choice(fields, tools)) is not None:
        return legacy
    if (plain := read_plain_choice(fields, tools)) is not None:
        return plain
    asked = fields.data["tool_choice"]
    path = fields.path_of("tool_choice")
    match asked:
        case {"type": "function" | "custom" as kind}:
            function = Fields(asked, path).read_object(kind)
            if function is None:
                raise invalid(f"{path}.{kind}", "must be an object, not null")
            return choose_function(read_name(function), tools, f"{path}.{kind}.name")
        case {"type": "allowed_tools"}:
            allowed = Fields(asked, path).read_object("allowed_tools")
            if allowed is None:
                raise invalid(f"{path}.allowed_tools", "must be an object, not null")
            return read_allowed(allowed, tools, within=True)
    accepted = ", ".join(map(repr, CHOICES))
    raise fields.wrong_value(
        "tool_choice", f"one of {accepted} or an object of type 'function', 'custom' or 'allowed_tools'"
    )


def read_variables(fields: Fields) -> dict[str, Any]:
    """Return the variables that a template gets besides the messages."""
    variables = build_thinking_variables(fields.choice("reasoning_effort", EFFORTS))
    given = fields.read_object("chat_template_kwargs")
    for name in given.data if given is not None else ():
        assert given is not None
        if name == "reasoning_effort":
            value: Any = given.choice(name, EFFORTS)
        elif name in TEMPLATE_FLAGS:
            value = given.flag(name) if given.has(name) else None
        else:
            accepted = ", ".join((*TEMPLATE_FLAGS, "reasoning_effort"))
            raise invalid(given.path, f"{quote_value(name)} may not be set; accepted are {accepted}")
        if value is not None:
            variables[name] = value
    return variables


async def count_tokens(fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient) -> Tokens:
    conversation = await anyio.to_thread.run_sync(read_conversation, fields, text)
    turns = caller.find_turns(read_salt(fields))
    return (await render_chat_prompt(conversation, fields, text, options, caller.has_left, turns=turns)).tokens


CHAT = Api("/v1/chat/completions", "chatcmpl-", read_request, ChatShape)
CHAT_TOKENS = TokenCounter(
    "/v1/chat/completions/input_tokens",
    count_tokens,
    lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
)
