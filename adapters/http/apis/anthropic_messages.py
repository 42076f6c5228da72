"""POST /v1/messages and its token counter: read Anthropic's requests strictly into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import anyio

from adapters.http.apis.anthropic_answer import MessageShape
from adapters.http.apis.anthropic_blocks import read_block, split_blocks
from adapters.http.apis.api import Api, TokenCounter
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.controls import ApiFieldNames, Controls, read_controls, read_model, read_salt
from adapters.http.request.parsed_request import ApiClient, ParsedRequest
from adapters.http.request.render_prompt import build_request, check_template, make_template_headers, render_chat_prompt
from adapters.http.request.resent_history import (
    UNNAMED_CALL,
    ResentHistory,
    Speaker,
    fields_of,
    find_newest_user_turn,
)
from adapters.http.request.tool_definitions import (
    MAX_TOOLS,
    SkippedTools,
    check_tools,
    choose_function,
    read_function,
    read_name,
    require_tools,
)
from adapters.http.request.unsupported import UnsupportedField
from adapters.http.wire.error_format import ANTHROPIC
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.text.conversation import (
    ChatMessage,
    Conversation,
    FunctionTool,
    ToolCall,
    ToolChoice,
    build_thinking_variables,
)
from adapters.text.model_text import Text
from adapters.text.reasoning_efforts import EFFORTS
from effects.ids import Tokens

LEAST_BUDGET = 1  # tokens; small models are asked for less than the 1,024 of Anthropic's API
ROLES = ("user", "assistant", "system")
HISTORY_ROLES: dict[str, Speaker] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
THINKING = ("enabled", "adaptive", "disabled", "between_tools")
DISPLAYS = ("summarized", "omitted")
CHOICES = ("auto", "any", "tool", "none")
# What other servers' tools leave in an assistant's message: a conversation that began elsewhere goes on without.
IGNORED_BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "compaction"),
)
UNSUPPORTED_FIELDS = {
    "container": UnsupportedField("is not supported: this server runs no code"),
    "mcp_servers": UnsupportedField("is not supported: this server calls no other servers; its client may"),
}
FORMATS = (("output_config", "format"), ("output_format",))
FIELD_NAMES = ApiFieldNames(
    UNSUPPORTED_FIELDS,
    max_tokens=("max_tokens",),
    stops="stop_sequences",
    choices="",
    min_max_tokens=0,
    formats=FORMATS,
)


async def read_request(fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient) -> ParsedRequest[None]:
    controls = read_message_controls(fields, options, text)
    skipped = SkippedTools()
    conversation = await read_conversation(fields, text, skipped)
    turns = caller.find_turns(controls.salt)
    prompt = await render_chat_prompt(conversation, fields, text, options, caller.has_left, turns=turns)
    headers = {**skipped.headers, **make_template_headers(conversation, text)}
    return build_request(controls, prompt, [fields.path_of("messages")], headers, turns, details=None)


async def count_tokens(fields: Fields, options: EdgeOptions, text: Text, caller: ApiClient) -> Tokens:
    read_model(fields, options.model)
    conversation = await read_conversation(fields, text, SkippedTools())
    turns = caller.find_turns(read_salt(fields))
    return (await render_chat_prompt(conversation, fields, text, options, caller.has_left, turns=turns)).tokens


async def read_conversation(fields: Fields, text: Text, skipped: SkippedTools) -> Conversation:
    check_template(text)
    return await anyio.to_thread.run_sync(read_messages, fields, skipped)


def read_message_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    fields.items("stop_sequences", 1 << 16)  # a lone string is not accepted
    fields.integer("max_tokens", 0)
    metadata = fields.read_object("metadata")
    if metadata is not None:
        metadata.text("user_id")
    return read_controls(fields, FIELD_NAMES, options, text.tokenizer)


def read_messages(fields: Fields, skipped: SkippedTools) -> Conversation:
    """Read the conversation. Raises ApiError naming the message and block that is wrong."""
    listed = fields.items("messages", 1 << 16)
    if not listed:
        raise invalid(fields.path_of("messages"), "must be an array of at least one message")
    messages: list[ChatMessage] = []
    if fields.has("system"):
        messages.append(
            make_text_message("system", split_blocks(fields, "system"), partial(read_block, accepted=("text",)))
        )
    history = ResentHistory(skipped.changes)
    history.changes.note(*fields.repairs)
    newest = find_newest_user_turn([guess_speaker(value) for value in listed], prefilled=True)
    if newest is not None and holds_earlier_turn(listed[newest]):
        newest = None
    for index, value in enumerate(listed):
        said = Fields.from_value(value, f"{fields.path_of('messages')}[{index}]")
        messages += [read_user(said)] if index == newest else read_message(said, history)
    last = messages[-1]
    if last.role == "assistant" and len(messages) > 1 and not (last.content.strip() or last.reasoning or last.calls):
        messages.pop()  # it only opens an answer, which happens anyway
    last = messages[-1]
    if last.calls:
        where = f"{fields.path_of('messages')}[{len(listed) - 1}].content"
        raise invalid(where, "ends with a tool_use: the tool_result of each must follow in a user's message")
    tools = read_tools(fields, skipped)
    history.changes.note_names(tool.client_name for tool in tools)
    choice, parallel = read_choice(fields, tools, skipped)
    continues = last.role == "assistant"
    return Conversation(messages, tools, choice, parallel, read_thinking(fields), continues=continues)


def guess_speaker(value: Any) -> Speaker:
    """Return the speaker of a message that was not read yet. A message with a tool's result is the tool's."""
    message = value if isinstance(value, dict) else {}
    role = message.get("role")
    content = message.get("content")
    if role in ("assistant", "system"):
        return "assistant" if role == "assistant" else "system"
    blocks = content if isinstance(content, list) else ()
    return "tool" if any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks) else "user"


def holds_earlier_turn(value: Any) -> bool:
    """Return whether a user's message begins with a turn that was refused before.

    Claude Code joins such a turn with the next one. An image then stands between two texts, whereas one turn has all
    its images before or after its text.
    """
    content = value.get("content") if isinstance(value, dict) else None
    blocks = content if isinstance(content, list) else ()
    texts = [isinstance(block, dict) and block.get("type") == "text" for block in blocks]
    return bool(texts) and texts[0] and texts[-1] and not all(texts)


def read_user(message: Fields) -> ChatMessage:
    """Read the newest turn of the user, strictly."""
    if message.choice("role", ROLES) is None:
        raise message.wrong_value("role", "one of " + ", ".join(map(repr, ROLES)))
    blocks = split_blocks(message, "content")
    for block in blocks:
        block.read_object("cache_control")
    return make_text_message("user", blocks, partial(read_block, accepted=("text", "tool_result")))


def read_message(message: Fields, history: ResentHistory) -> list[ChatMessage]:
    """Read any other message, as far as possible.

    One message of theirs may become several of ours: the results of tools are messages of their own.
    """
    role = history.read_role(message.data.get("role"), HISTORY_ROLES)
    content = message.data.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else history.split_parts(content)
    blocks = fields_of(parts, message.path_of("content"))
    if role == "assistant":
        return [read_assistant(blocks, history)]
    if not any(block.data.get("type") == "tool_result" for block in blocks):
        history.begin_message()
    if role == "system":
        return [make_text_message("system", blocks, partial(read_history_block, history))]
    found: list[ChatMessage] = []
    texts: list[Fields] = []
    for block in blocks:
        if block.data.get("type") == "tool_result":
            if texts:
                found.append(make_text_message("user", texts, partial(read_history_block, history)))
            texts = []
            found.append(read_result(block, history))
        else:
            texts.append(block)
    return (
        [*found, make_text_message("user", texts, partial(read_history_block, history))]
        if texts or not found
        else found
    )


def make_text_message(
    role: Literal["system", "user"], blocks: Sequence[Fields], text_of: Callable[[Fields], str]
) -> ChatMessage:
    """Return a message of text blocks. The next message opens where the last block ends, so only blocks before it are
    cuts.
    """
    texts = []
    cuts = []
    size = 0
    for block in blocks:
        texts.append(text_of(block))
        size += len(texts[-1])
        if isinstance(block.data.get("cache_control"), dict) and block is not blocks[-1]:
            cuts.append(size)
        size += 1
    return ChatMessage(role, "\n".join(texts), cuts=tuple(cuts))


def read_assistant(blocks: Sequence[Fields], history: ResentHistory) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    called: list[ToolCall] = []
    history.begin_message()
    for block in blocks:
        match block.data.get("type"):
            case "thinking":
                thoughts.append(history.read_part(block.data))
            case "tool_use":
                call = history.read_call(*(block.data.get(name) for name in ("id", "name", "input")))
                if call is None:
                    texts.append(UNNAMED_CALL)
                else:
                    called.append(call)
            case "redacted_thinking":
                pass  # only the server that wrote it can read it
            case str(kind) if kind in IGNORED_BLOCKS:
                pass
            case _:
                texts.append(history.read_part(block.data))
    return ChatMessage("assistant", "".join(texts), "".join(thoughts), tuple(called))


def read_history_block(history: ResentHistory, block: Fields) -> str:
    return history.read_part(block.data)


def read_result(block: Fields, history: ResentHistory) -> ChatMessage:
    content = block.data.get("content")
    parts = history.split_parts(content) if content is not None else ()
    texts = [history.read_part(part) for part in parts if part.get("type") != "tool_reference"]
    text = "\n".join(texts) or ("error" if block.data.get("is_error") is True else "")
    return history.read_result(block.data.get("tool_use_id"), text)


def read_tools(fields: Fields, skipped: SkippedTools) -> tuple[FunctionTool, ...]:
    """Return the tools that are described. Anthropic's own, which its servers run or its models know, are skipped and
    noted.
    """
    tools = []
    for index, value in enumerate(fields.items("tools", MAX_TOOLS) or []):
        tool = Fields.from_value(value, f"{fields.path_of('tools')}[{index}]")
        kind = tool.text("type")
        if kind is not None and kind != "custom":
            skipped.note(kind, tool.text("name"))
            continue
        if tool.read_object("input_schema") is None:
            raise tool.wrong_value("input_schema", "an object: a JSON schema")
        tools.append(read_function(tool, "input_schema"))
    return check_tools(tools, fields.path_of("tools"))


def read_choice(fields: Fields, tools: Sequence[FunctionTool], skipped: SkippedTools) -> tuple[ToolChoice, bool]:
    """Return what is to be called, and whether several calls may be made at once."""
    given = fields.read_object("tool_choice")
    if given is None:
        return ToolChoice(), True
    kind = given.choice("type", CHOICES)
    parallel = not given.flag("disable_parallel_tool_use")
    if (fallback := skipped.find_fallback(given.data, tools)) is not None:
        return fallback, parallel
    match kind:
        case "tool":
            return choose_function(read_name(given), tools, given.path_of("name")), parallel
        case "any":
            return require_tools(ToolChoice("required"), tools, fields.path_of("tool_choice")), parallel
        case "auto" | "none":
            return ToolChoice(kind), parallel
        case _:
            raise given.wrong_value("type", "one of " + ", ".join(map(repr, CHOICES)))


def read_thinking(fields: Fields) -> dict[str, Any]:
    """Return the template's variables. They include the budget: a model that was trained to keep one does."""
    output = fields.read_object("output_config")
    effort = None if output is None else output.choice("effort", EFFORTS)
    given = fields.read_object("thinking")
    if given is None:
        return build_thinking_variables(effort)
    kind = given.choice("type", THINKING)
    if kind is None:
        raise given.wrong_value("type", "one of " + ", ".join(map(repr, THINKING)))
    given.choice("display", DISPLAYS)
    variables = build_thinking_variables(effort, kind != "disabled")
    budget = given.integer("budget_tokens", LEAST_BUDGET)
    if kind != "enabled":
        return variables
    if budget is None:
        raise given.wrong_value("budget_tokens", f"an integer >= {LEAST_BUDGET}")
    most = fields.integer("max_tokens", 0)
    if most is not None and budget >= most:
        raise invalid(given.path_of("budget_tokens"), f"must be below max_tokens, which is {most}; it is {budget}")
    return {**variables, "thinking_budget": budget}


MESSAGES = Api("/v1/messages", "msg_", read_request, MessageShape, ANTHROPIC)
MESSAGE_TOKENS = TokenCounter(
    "/v1/messages/count_tokens", count_tokens, lambda tokens: {"input_tokens": tokens}, ANTHROPIC
)
