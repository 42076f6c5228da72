"""POST /v1/messages and what counts its tokens: Anthropic's requests, read strictly into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import anyio

from adapters.http.apis.anthropic_answer import MessageShape
from adapters.http.apis.api import Api, Counter
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked, Asker
from adapters.http.request.controls import Controls, Words, read_controls, read_model, read_salt
from adapters.http.request.render_prompt import asked, chat_prompt, check_template, template_headers
from adapters.http.request.resent_history import (
    UNNAMED_CALL,
    ResentHistory,
    Speaker,
    document_text,
    fields_of,
    newest_user_turn,
)
from adapters.http.request.tool_definitions import (
    MAX_TOOLS,
    Skipped,
    check_tools,
    named,
    needs_tools,
    read_function,
    read_name,
)
from adapters.http.request.unsupported import Missing
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

LEAST_BUDGET = 1024  # tokens, Anthropic's
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
NOT_TEXT = ("image", "document", "container_upload", "search_result", "browser_state")
# What other servers' tools leave in an assistant's message: a conversation that began elsewhere goes on without.
UNSEEN = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "compaction"),
)
MISSING = {
    "container": Missing("is not supported: this server runs no code"),
    "mcp_servers": Missing("is not supported: this server calls nobody; its client may"),
}
FORMATS = (("output_config", "format"), ("output_format",))
WORDS = Words(MISSING, max_tokens=("max_tokens",), stops="stop_sequences", choices="", least=0, formats=FORMATS)


async def read(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Asked:
    controls, skipped = read_message_controls(fields, options, text), Skipped()
    conversation = await read_whole(fields, text, skipped)
    turns = asker.turns(controls.salt)
    prompt = await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns)
    headers = {**skipped.headers, **template_headers(conversation, text)}
    return asked(controls, prompt, [fields.at("messages")], headers, turns)


async def count(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Tokens:
    read_model(fields, options)
    conversation, turns = await read_whole(fields, text, Skipped()), asker.turns(read_salt(fields))
    return (await chat_prompt(conversation, fields, text, options, asker.gone, turns=turns)).tokens


async def read_whole(fields: Fields, text: Text, skipped: Skipped) -> Conversation:
    check_template(text)
    return await anyio.to_thread.run_sync(read_messages, fields, skipped)


def read_message_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    fields.items("stop_sequences", 1 << 16)  # a lone string is none
    fields.integer("max_tokens", 0)
    metadata = fields.within("metadata")
    if metadata is not None:
        metadata.text("user_id")
    return read_controls(fields, WORDS, options, text.tokenizer)


def read_messages(fields: Fields, skipped: Skipped) -> Conversation:
    """Raises ApiError naming the message and block that is wrong."""
    listed = fields.items("messages", 1 << 16)
    if not listed:
        raise invalid(fields.at("messages"), "must be an array of at least one message")
    messages: list[ChatMessage] = []
    if fields.has("system"):
        messages.append(spoken("system", blocks_of(fields, "system"), partial(read_block, accepted=("text",))))
    history = ResentHistory(skipped.changes)
    history.changes.note(*fields.mended)
    newest = newest_user_turn([speaker_of(value) for value in listed], prefilled=True)
    if newest is not None and holds_earlier_turn(listed[newest]):
        newest = None
    for place, value in enumerate(listed):
        said = Fields.of(value, f"{fields.at('messages')}[{place}]")
        messages += [read_user(said)] if place == newest else read_message(said, history)
    last = messages[-1]
    if last.role == "assistant" and len(messages) > 1 and not (last.content.strip() or last.reasoning or last.calls):
        messages.pop()  # it opens an answer, as is done anyway
    last = messages[-1]
    if last.calls:
        where = f"{fields.at('messages')}[{len(listed) - 1}].content"
        raise invalid(where, "ends with a tool_use: the tool_result of each must follow in a user's message")
    tools = read_tools(fields, skipped)
    history.changes.note_names(tool.client_name for tool in tools)
    choice, parallel = read_choice(fields, tools, skipped)
    continues = last.role == "assistant"
    return Conversation(messages, tools, choice, parallel, read_thinking(fields), continues=continues)


def speaker_of(value: Any) -> Speaker:
    """Return who sends a message that nobody has looked into yet: a tool, where it has a tool's result."""
    message = value if isinstance(value, dict) else {}
    role, content = message.get("role"), message.get("content")
    if role in ("assistant", "system"):
        return "assistant" if role == "assistant" else "system"
    blocks = content if isinstance(content, list) else ()
    return "tool" if any(isinstance(one, dict) and one.get("type") == "tool_result" for one in blocks) else "user"


def holds_earlier_turn(value: Any) -> bool:
    """Tell whether a user's message begins with a turn that was refused before.

    Claude Code joins such a turn with the next one: an image stands between two texts then, where one turn has all its
    images in front of its text or behind it.
    """
    content = value.get("content") if isinstance(value, dict) else None
    blocks = content if isinstance(content, list) else ()
    texts = [isinstance(block, dict) and block.get("type") == "text" for block in blocks]
    return bool(texts) and texts[0] and texts[-1] and not all(texts)


def read_user(message: Fields) -> ChatMessage:
    """Read the newest turn of the user, strictly."""
    if message.choice("role", ROLES) is None:
        raise message.wrong("role", "one of " + ", ".join(map(repr, ROLES)))
    blocks = blocks_of(message, "content")
    for block in blocks:
        block.within("cache_control")
    return spoken("user", blocks, partial(read_block, accepted=("text", "tool_result")))


def read_message(message: Fields, history: ResentHistory) -> list[ChatMessage]:
    """Read any other message, as far as it can be.

    One of theirs may be several of ours: the results of tools are messages of their own.
    """
    role = history.read_role(message.data.get("role"), HISTORY_ROLES)
    content = message.data.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else history.parts_of(content)
    blocks = fields_of(parts, message.at("content"))
    if role == "assistant":
        return [read_assistant(blocks, history)]
    if not any(block.data.get("type") == "tool_result" for block in blocks):
        history.begin_message()
    if role == "system":
        return [spoken("system", blocks, partial(read_old, history))]
    found: list[ChatMessage] = []
    texts: list[Fields] = []
    for block in blocks:
        if block.data.get("type") == "tool_result":
            if texts:
                found.append(spoken("user", texts, partial(read_old, history)))
            texts = []
            found.append(read_result(block, history))
        else:
            texts.append(block)
    return [*found, spoken("user", texts, partial(read_old, history))] if texts or not found else found


def spoken(role: Literal["system", "user"], blocks: Sequence[Fields], text_of: Callable[[Fields], str]) -> ChatMessage:
    """Blocks of text. Where the last one ends, the next message opens: only those before it are cuts."""
    texts, cuts, size = [], [], 0
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
                pass  # nobody but who wrote it can read it
            case str(kind) if kind in UNSEEN:
                pass
            case _:
                texts.append(history.read_part(block.data))
    return ChatMessage("assistant", "".join(texts), "".join(thoughts), tuple(called))


def read_old(history: ResentHistory, block: Fields) -> str:
    return history.read_part(block.data)


def read_result(block: Fields, history: ResentHistory) -> ChatMessage:
    content = block.data.get("content")
    parts = history.parts_of(content) if content is not None else ()
    texts = [history.read_part(part) for part in parts if part.get("type") != "tool_reference"]
    text = "\n".join(texts) or ("error" if block.data.get("is_error") is True else "")
    return history.read_result(block.data.get("tool_use_id"), text)


def blocks_of(fields: Fields, name: str) -> Sequence[Fields]:
    content = fields.data.get(name)
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, fields.at(name))]
    if not isinstance(content, list):
        raise fields.wrong(name, "a string or an array of blocks")
    return [Fields.of(block, f"{fields.at(name)}[{place}]") for place, block in enumerate(content)]


def read_block(block: Fields, accepted: Sequence[str]) -> str:
    """A block of text. accepted: what may stand there besides."""
    kind = block.data.get("type")
    if (text := document_text(block.data)) is not None:
        return text
    if kind in NOT_TEXT:
        raise invalid(block.at("type"), f"{kind!r} blocks are not supported: this server's model reads text only")
    if kind != "text":
        raise block.wrong("type", "one of " + ", ".join(map(repr, accepted)))
    return required(block, "text")


def required(block: Fields, name: str) -> str:
    value = block.text(name)
    if value is None:
        raise block.wrong(name, "a string")
    return value


def read_tools(fields: Fields, skipped: Skipped) -> tuple[FunctionTool, ...]:
    """Those that are described. Anthropic's own, which it runs itself or its models know, are left out and told."""
    tools = []
    for place, value in enumerate(fields.items("tools", MAX_TOOLS) or []):
        tool = Fields.of(value, f"{fields.at('tools')}[{place}]")
        kind = tool.text("type")
        if kind is not None and kind != "custom":
            skipped.note(kind, tool.text("name"))
            continue
        if tool.within("input_schema") is None:
            raise tool.wrong("input_schema", "an object: a JSON schema")
        tools.append(read_function(tool, "input_schema"))
    return check_tools(tools, fields.at("tools"))


def read_choice(fields: Fields, tools: Sequence[FunctionTool], skipped: Skipped) -> tuple[ToolChoice, bool]:
    """What is to be called, and whether several may be at once."""
    given = fields.within("tool_choice")
    if given is None:
        return ToolChoice(), True
    kind = given.choice("type", CHOICES)
    parallel = not given.flag("disable_parallel_tool_use")
    if (fallback := skipped.fallback(given.data, tools)) is not None:
        return fallback, parallel
    match kind:
        case "tool":
            return named(read_name(given), tools, given.at("name")), parallel
        case "any":
            return needs_tools(ToolChoice("required"), tools, fields.at("tool_choice")), parallel
        case "auto" | "none":
            return ToolChoice(kind), parallel
        case _:
            raise given.wrong("type", "one of " + ", ".join(map(repr, CHOICES)))


def read_thinking(fields: Fields) -> dict[str, Any]:
    """Variables of the template. A budget is told to it: a model that was trained to keep one does."""
    output = fields.within("output_config")
    effort = None if output is None else output.choice("effort", EFFORTS)
    given = fields.within("thinking")
    if given is None:
        return build_thinking_variables(effort)
    kind = given.choice("type", THINKING)
    if kind is None:
        raise given.wrong("type", "one of " + ", ".join(map(repr, THINKING)))
    given.choice("display", DISPLAYS)
    told = build_thinking_variables(effort, kind != "disabled")
    budget = given.integer("budget_tokens", LEAST_BUDGET)
    if kind != "enabled":
        return told
    if budget is None:
        raise given.wrong("budget_tokens", f"an integer >= {LEAST_BUDGET}")
    most = fields.integer("max_tokens", 0)
    if most is not None and budget >= most:
        raise invalid(given.at("budget_tokens"), f"must be below max_tokens, which is {most}; it is {budget}")
    return {**told, "thinking_budget": budget}


MESSAGES = Api("/v1/messages", "msg_", read, MessageShape, ANTHROPIC)
MESSAGE_TOKENS = Counter("/v1/messages/count_tokens", count, lambda tokens: {"input_tokens": tokens}, ANTHROPIC)
