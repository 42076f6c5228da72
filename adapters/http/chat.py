"""POST /v1/chat/completions: reads a conversation strictly, and makes of it what all APIs make of theirs."""

from __future__ import annotations

from typing import Any

import anyio

from adapters.http.api import Api, Asked, Asker, Counter
from adapters.http.controls import Controls, Words, read_controls, read_salt
from adapters.http.errors import invalid
from adapters.http.fields import Fields, shown
from adapters.http.openai_shape import ChatShape
from adapters.http.options import EdgeOptions
from adapters.http.prompts import asked, chat_prompt, check_template, template_headers
from adapters.http.tools import (
    CHOICES,
    MAX_TOOLS,
    check_tools,
    named,
    plain_choice,
    read_allowed,
    read_function,
    read_name,
)
from adapters.http.unsupported import MISSING_IN_CHAT
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, Role, ToolCall, ToolChoice, thinking
from adapters.text.efforts import EFFORTS
from adapters.text.text import Text
from effects.ids import Tokens

MAX_LOGPROBS = 20
MAX_MESSAGES = 1 << 16
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEMPLATE_FLAGS = ("enable_thinking", "thinking", "preserve_thinking")
NOT_TEXT = ("image_url", "input_image", "image", "input_audio", "audio", "file", "input_file", "video_url", "video")
WORDS = Words(MISSING_IN_CHAT)


async def read(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Asked:
    controls = read_chat_controls(fields, options, text)
    turns = asker.turns(controls.salt)
    # there may be tens of thousands of messages
    conversation = await anyio.to_thread.run_sync(read_conversation, fields, text)
    prompt = await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns)
    return asked(controls, prompt, [fields.at("messages")], template_headers(conversation, text), turns)


def read_chat_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        raise invalid(fields.at("top_logprobs"), "needs `logprobs: true`")
    controls = read_controls(fields, WORDS, options, text.tokenizer, (top or 0) if wanted else -1)
    modalities = fields.items("modalities", 8)
    if modalities is not None and modalities != ["text"]:
        raise fields.wrong("modalities", '["text"]; this server answers with text only')
    return controls


def read_conversation(fields: Fields, text: Text) -> Conversation:
    """Raises ApiError naming the message and part that is wrong."""
    check_template(text)
    listed = fields.items("messages", MAX_MESSAGES)
    if not listed:
        raise invalid(fields.at("messages"), "must be an array of at least one message")
    messages: list[ChatMessage] = []
    calls: set[str] = set()
    for place, value in enumerate(listed):
        messages.append(read_message(Fields.of(value, f"{fields.at('messages')}[{place}]"), calls))
    tools = read_tools(fields)
    return Conversation(
        messages,
        tools,
        read_choice(fields, tools),
        fields.flag("parallel_tool_calls", True),
        read_variables(fields),
        fields.flag("add_generation_prompt", True),
        read_continuation(fields, messages[-1]),
    )


def read_continuation(fields: Fields, last: ChatMessage) -> bool:
    """Does the answer go on with the last message? As vLLM and transformers have it."""
    if not fields.flag("continue_final_message"):
        return False
    if last.role != "assistant" or last.calls or not (last.content or last.reasoning).strip():
        raise invalid(
            fields.at("continue_final_message"), "needs a last message of the assistant's that says something"
        )
    if fields.data.get("add_generation_prompt") is True:
        raise invalid(fields.at("continue_final_message"), "opens no message, so it goes without add_generation_prompt")
    return True


def read_message(message: Fields, calls: set[str]) -> ChatMessage:
    """`calls`: ids of the tool calls so far; an assistant's message adds to them, a tool's must name one."""
    role = message.choice("role", ROLES)
    if role is None:
        raise message.wrong("role", "one of " + ", ".join(map(repr, ROLES)))
    content, reasoning = read_content(message), ""
    made: tuple[ToolCall, ...] = ()
    if role == "assistant":
        spelling = message.given("reasoning_content", "reasoning")
        reasoning = message.text(spelling) or ""
        made = read_calls(message, calls)
        if content is None:
            content = message.text("refusal") or ""
    if content is None:
        raise message.wrong("content", "a string or an array of text parts")
    answers = message.text("tool_call_id", 256) if role == "tool" else None
    if role == "tool" and answers not in calls:
        raise message.wrong("tool_call_id", "the id of a tool call of an assistant's message before it")
    return ChatMessage(ROLES[role], content, reasoning, made, answers, message.text("name", 128))


def read_content(message: Fields) -> str | None:
    content = message.data.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise message.wrong("content", "a string or an array of text parts")
    texts = []
    for place, value in enumerate(content):
        part = Fields.of(value, f"{message.at('content')}[{place}]")
        kind = part.data.get("type")
        if isinstance(kind, str) and kind in NOT_TEXT:
            raise invalid(part.at("type"), f"{kind!r} parts are not supported: this server's model reads text only")
        if kind not in ("text", "refusal"):
            raise part.wrong("type", "'text'")
        piece = part.text(kind)
        if piece is None:
            raise part.wrong(kind, "a string")
        texts.append(piece)
    return "\n".join(texts)


def read_calls(message: Fields, calls: set[str]) -> tuple[ToolCall, ...]:
    read = []
    for place, value in enumerate(message.items("tool_calls", MAX_TOOLS) or []):
        call = Fields.of(value, f"{message.at('tool_calls')}[{place}]")
        call.choice("type", ("function",))
        id_, function = call.text("id", 256), call.within("function")
        if id_ is None:
            raise call.wrong("id", "a string")
        if function is None:
            raise call.wrong("function", "an object")
        calls.add(id_)
        read.append(ToolCall(id_, read_name(function), function.text("arguments") or "{}"))
    return tuple(read)


def read_tools(fields: Fields) -> tuple[FunctionTool, ...]:
    tools = []
    for place, value in enumerate(fields.items("tools", MAX_TOOLS) or []):
        tool = Fields.of(value, f"{fields.at('tools')}[{place}]")
        if tool.choice("type", ("function",)) is None:
            raise tool.wrong("type", "'function'")
        function = tool.within("function")
        if function is None:
            raise tool.wrong("function", "an object")
        tools.append(read_function(function))
    return check_tools(tools, fields.at("tools"))


def read_choice(fields: Fields, tools: tuple[FunctionTool, ...]) -> ToolChoice:
    if (plain := plain_choice(fields, tools)) is not None:
        return plain
    asked, path = fields.data["tool_choice"], fields.at("tool_choice")
    match asked:
        case {"type": "function"}:
            function = Fields(asked, path).within("function")
            if function is None:
                raise invalid(f"{path}.function", "must be an object, not null")
            return named(read_name(function), tools, f"{path}.function.name")
        case {"type": "allowed_tools"}:
            allowed = Fields(asked, path).within("allowed_tools")
            if allowed is None:
                raise invalid(f"{path}.allowed_tools", "must be an object, not null")
            return read_allowed(allowed, tools, "function")
    accepted = ", ".join(map(repr, CHOICES))
    raise fields.wrong("tool_choice", f"one of {accepted} or an object of type 'function' or 'allowed_tools'")


def read_variables(fields: Fields) -> dict[str, Any]:
    """What a template is told besides the messages."""
    variables = thinking(fields.choice("reasoning_effort", EFFORTS))
    given = fields.within("chat_template_kwargs")
    for name in given.data if given is not None else ():
        assert given is not None
        if name == "reasoning_effort":
            value: Any = given.choice(name, EFFORTS)
        elif name in TEMPLATE_FLAGS:
            value = given.flag(name) if given.has(name) else None
        else:
            accepted = ", ".join((*TEMPLATE_FLAGS, "reasoning_effort"))
            raise invalid(given.path, f"{shown(name)} may not be set; accepted are {accepted}")
        if value is not None:
            variables[name] = value
    return variables


async def count(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Tokens:
    conversation = await anyio.to_thread.run_sync(read_conversation, fields, text)
    turns = asker.turns(read_salt(fields))
    return (await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns)).tokens


CHAT = Api("/v1/chat/completions", "chatcmpl-", read, ChatShape)
CHAT_TOKENS = Counter(
    "/v1/chat/completions/input_tokens",
    count,
    lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
)
