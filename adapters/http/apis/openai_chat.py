"""POST /v1/chat/completions: reads a conversation strictly, and makes of it what all APIs make of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio

from adapters.http.apis.api import Api, Counter
from adapters.http.apis.openai_chat_answer import ChatShape
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked, Asker
from adapters.http.request.controls import Controls, Words, read_controls, read_salt
from adapters.http.request.custom_tools import INPUT, read_custom
from adapters.http.request.legacy_functions import is_legacy, read_function_choice, read_functions
from adapters.http.request.render_prompt import asked, chat_prompt, check_template, template_headers
from adapters.http.request.resent_history import (
    MOST_NAME,
    UNNAMED_CALL,
    ResentHistory,
    Speaker,
    document_text,
    newest_user_turn,
    speaker_name,
)
from adapters.http.request.tool_definitions import (
    CALLED,
    CHOICES,
    MAX_TOOLS,
    Skipped,
    check_tools,
    named,
    plain_choice,
    read_allowed,
    read_function,
    read_name,
)
from adapters.http.request.unsupported import MISSING_IN_CHAT
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, shown
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
WORDS = Words(MISSING_IN_CHAT)


async def read(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Asked:
    controls = read_chat_controls(fields, options, text)
    turns = asker.turns(controls.salt)
    # there may be tens of thousands of messages
    skipped = Skipped()
    conversation = await anyio.to_thread.run_sync(read_conversation, fields, text, skipped)
    prompt = await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns)
    echo = {"customs": read_customs(conversation.tools), "legacy": is_legacy(fields)}
    headers = {**skipped.headers, **template_headers(conversation, text)}
    return asked(controls, prompt, [fields.at("messages")], headers, turns, echo=echo)


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


def read_conversation(fields: Fields, text: Text, skipped: Skipped | None = None) -> Conversation:
    """Raises ApiError naming the message and part that is wrong. skipped: hears what was changed."""
    check_template(text)
    history = ResentHistory() if skipped is None else ResentHistory(skipped.changes)
    history.changes.note(*fields.mended)
    listed = fields.items("messages", MAX_MESSAGES)
    if not listed:
        raise invalid(fields.at("messages"), "must be an array of at least one message")
    newest = newest_user_turn([speaker_of(value) for value in listed])
    messages: list[ChatMessage] = []
    for place, value in enumerate(listed):
        message = Fields.of(value, f"{fields.at('messages')}[{place}]")
        messages.append(read_user(message) if place == newest else read_message(message, history))
    tools = read_tools(fields)
    history.changes.note_names(tool.client_name for tool in tools)
    return Conversation(
        messages,
        tools,
        read_choice(fields, tools),
        fields.flag("parallel_tool_calls", True) and not is_legacy(fields),
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


def speaker_of(value: Any) -> Speaker:
    """Return who sends a message that nobody has looked into yet. What cannot be told is read as a user's."""
    role = value.get("role") if isinstance(value, dict) else None
    return ROLES.get(role, "user") if isinstance(role, str) else "user"


def read_user(message: Fields) -> ChatMessage:
    """Read the newest turn of the user, strictly."""
    role = message.choice("role", ROLES)
    if role is None:
        raise message.wrong("role", "one of " + ", ".join(map(repr, ROLES)))
    content = read_content(message)
    if content is None:
        raise message.wrong("content", "a string or an array of text parts")
    return ChatMessage("user", content, name=message.text("name", MOST_NAME))


def read_message(message: Fields, history: ResentHistory) -> ChatMessage:
    """Read any other message, as far as it can be."""
    role, data = history.read_role(message.data.get("role"), ROLES), message.data
    content, name = data.get("content"), data.get("name")
    if role == "tool":
        return history.read_result(data.get("tool_call_id"), history.read_text(content, "\n"), name)
    history.begin_message()
    if role != "assistant":
        return ChatMessage(role, history.read_text(content, "\n"), name=speaker_name(name))
    said = content if content is not None else data.get("refusal") or ""
    calls = [history.read_call(*call) for call in calls_of(data)]
    texts = [history.read_text(said, "\n"), *(UNNAMED_CALL for call in calls if call is None)]
    made = tuple(call for call in calls if call is not None)
    reasoning = data.get(message.given("reasoning_content", "reasoning"))
    thought = reasoning if isinstance(reasoning, str) else ""
    return ChatMessage("assistant", "\n".join(filter(None, texts)), thought, made, name=speaker_name(name))


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
        if (text := document_text(part.data)) is not None:
            texts.append(text)
            continue
        if isinstance(kind, str) and kind in NOT_TEXT:
            raise invalid(part.at("type"), f"{kind!r} parts are not supported: this server's model reads text only")
        if kind not in ("text", "refusal"):
            raise part.wrong("type", "'text'")
        piece = part.text(kind)
        if piece is None:
            raise part.wrong(kind, "a string")
        texts.append(piece)
    return "\n".join(texts)


def calls_of(message: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield id, name and arguments of a message's calls: of functions, of custom tools, or in the legacy form."""
    listed = message.get("tool_calls")
    for value in listed if isinstance(listed, list) else ():
        call = value if isinstance(value, dict) else {}
        function, custom = call.get("function"), call.get("custom")
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
    for place, value in enumerate(fields.items("tools", MAX_TOOLS) or []):
        tool = Fields.of(value, f"{fields.at('tools')}[{place}]")
        kind = tool.choice("type", CALLED)
        if kind is None:
            raise tool.wrong("type", "'function' or 'custom'")
        function = tool.within(kind)
        if function is None:
            raise tool.wrong(kind, "an object")
        tools.append(read_custom(function) if kind == "custom" else read_function(function))
    return check_tools(tools, fields.at("functions" if is_legacy(fields) else "tools"))


def read_customs(tools: Sequence[FunctionTool]) -> frozenset[str]:
    """Return the names of those that are called with text."""
    return frozenset(tool.name for tool in tools if tool.parameters is INPUT)


def read_choice(fields: Fields, tools: tuple[FunctionTool, ...]) -> ToolChoice:
    if not fields.has("tool_choice") and (legacy := read_function_choice(fields, tools)) is not None:
        return legacy
    if (plain := plain_choice(fields, tools)) is not None:
        return plain
    asked, path = fields.data["tool_choice"], fields.at("tool_choice")
    match asked:
        case {"type": "function" | "custom" as kind}:
            function = Fields(asked, path).within(kind)
            if function is None:
                raise invalid(f"{path}.{kind}", "must be an object, not null")
            return named(read_name(function), tools, f"{path}.{kind}.name")
        case {"type": "allowed_tools"}:
            allowed = Fields(asked, path).within("allowed_tools")
            if allowed is None:
                raise invalid(f"{path}.allowed_tools", "must be an object, not null")
            return read_allowed(allowed, tools, within=True)
    accepted = ", ".join(map(repr, CHOICES))
    raise fields.wrong("tool_choice", f"one of {accepted} or an object of type 'function', 'custom' or 'allowed_tools'")


def read_variables(fields: Fields) -> dict[str, Any]:
    """What a template is told besides the messages."""
    variables = build_thinking_variables(fields.choice("reasoning_effort", EFFORTS))
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
