"""POST /v1/chat/completions: reads a conversation strictly, and makes of it what a chat template expects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import anyio
from attrs import frozen

from adapters.http.api import Api, Asked
from adapters.http.controls import Controls, Words, read_controls
from adapters.http.errors import ApiError, far_too_long, invalid, left
from adapters.http.fields import Fields, shown
from adapters.http.openai_shape import ChatShape
from adapters.http.options import EdgeOptions
from adapters.http.unsupported import MISSING_IN_CHAT
from adapters.text.pieces import size_of
from adapters.text.template import TemplateFailed, TemplateRefused
from adapters.text.text import Text
from adapters.text.tokenizer import GaveUp, Gone, TooLong
from effects.ids import Tokens

MAX_TOOLS = 512
MAX_TOOL_BYTES = 1 << 20
MAX_LOGPROBS = 20
COUNTED = 2  # contexts: a prompt is counted so far, then it is refused as having at least so many tokens
THOUGHTS = 8  # contexts of reasoning that a template may be given to leave out
ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
TEMPLATE_FLAGS = ("enable_thinking", "thinking", "preserve_thinking")
NOT_TEXT = ("image_url", "input_image", "image", "input_audio", "audio", "file", "input_file", "video_url", "video")
UNPARSED = {"x-rekindle-tools": "unparsed; a call comes back as text, with finish_reason stop"}
WORDS = Words(MISSING_IN_CHAT)
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@frozen
class Chat:
    """A conversation as templates read it, and what else they are told."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]

    @property
    def headers(self) -> Mapping[str, str]:
        """What the answer's headers say of it: a call that comes back as text must not come as a surprise."""
        return UNPARSED if "tools" in self.variables else {}


async def read(fields: Fields, options: EdgeOptions, text: Text, gone: Gone) -> Asked:
    controls = read_chat_controls(fields, options, text)
    chat = await anyio.to_thread.run_sync(read_chat, fields, text)  # there may be tens of thousands of messages
    return Asked(controls, [await encode_chat(chat, text, options, gone)], [fields.at("messages")], chat.headers)


def read_chat_controls(fields: Fields, options: EdgeOptions, text: Text) -> Controls:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        raise invalid(fields.at("top_logprobs"), "needs `logprobs: true`")
    controls = read_controls(fields, WORDS, options, text.tokenizer.end_tokens, (top or 0) if wanted else -1)
    modalities = fields.items("modalities", 8)
    if modalities is not None and modalities != ["text"]:
        raise fields.wrong("modalities", '["text"]; this server answers with text only')
    choice = fields.data.get("tool_choice")
    if choice is not None and choice not in ("none", "auto"):
        raise fields.wrong("tool_choice", '"none" or "auto" (this server does not force tool calls yet)')
    return controls


def read_chat(fields: Fields, text: Text) -> Chat:
    """Raises ApiError naming the message and part that is wrong."""
    if text.template is None:
        message = "This checkpoint has no chat template. Use /v1/completions, or serve a checkpoint that has one."
        raise ApiError(400, message, code="no_chat_template")
    listed = fields.items("messages", 1 << 16)
    if not listed:
        raise invalid(fields.at("messages"), "must be an array of at least one message")
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for place, value in enumerate(listed):
        said = Fields.of(value, f"{fields.at('messages')}[{place}]")
        messages.append(read_message(said, calls, text.template.wants_argument_text))
    return Chat(messages, read_variables(fields))


def read_message(message: Fields, calls: set[str], argument_text: bool) -> dict[str, Any]:
    """`calls`: ids of the tool calls so far; an assistant's message adds to them, a tool's must name one."""
    role = message.choice("role", ROLES)
    if role is None:
        raise message.wrong("role", "one of " + ", ".join(map(repr, ROLES)))
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": read_content(message)}
    if (name := message.text("name", 128)) is not None:
        read["name"] = name
    if role == "assistant":
        for spelling in ("reasoning_content", "reasoning"):
            if (reasoning := message.text(spelling)) is not None:
                read.setdefault("reasoning_content", reasoning)
        if tool_calls := read_calls(message, calls, argument_text):
            read["tool_calls"] = tool_calls
    if read["content"] is None:
        if role != "assistant":
            raise message.wrong("content", "a string or an array of text parts")
        read["content"] = message.text("refusal") or ""
    if role == "tool":
        call = message.text("tool_call_id", 256)
        if call is None or call not in calls:
            raise message.wrong("tool_call_id", "the id of a tool call of an assistant's message before it")
        read["tool_call_id"] = call
    return read


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


def read_calls(message: Fields, calls: set[str], argument_text: bool) -> list[dict[str, Any]]:
    read = []
    for place, value in enumerate(message.items("tool_calls", MAX_TOOLS) or []):
        call = Fields.of(value, f"{message.at('tool_calls')}[{place}]")
        call.choice("type", ("function",))
        id_, function = call.text("id", 256), call.within("function")
        if id_ is None:
            raise call.wrong("id", "a string")
        if function is None:
            raise call.wrong("function", "an object")
        arguments = function.text("arguments")
        calls.add(id_)
        given = {"name": read_name(function), "arguments": as_template(arguments or "{}", argument_text)}
        read.append({"id": id_, "type": "function", "function": given})
    return read


def as_template(arguments: str, as_text: bool) -> Any:
    """Kept as they were written where the template can show that, so that a conversation's prompt only ever grows."""
    if not as_text:
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if isinstance(parsed, dict):
            return parsed
    return arguments


def read_name(function: Fields) -> str:
    name = function.text("name", 128)
    if name is None or not NAME.fullmatch(name):
        raise function.wrong("name", "1 to 128 letters, digits or any of _ . : -")
    return name


def read_variables(fields: Fields) -> dict[str, Any]:
    """What a template is told besides the messages."""
    fields.flag("parallel_tool_calls")
    variables: dict[str, Any] = {}
    tools = read_tools(fields)
    if tools and fields.data.get("tool_choice") != "none":
        variables["tools"] = tools
    effort = fields.choice("reasoning_effort", EFFORTS)
    if effort is not None:
        variables["reasoning_effort"] = effort
    if not fields.flag("add_generation_prompt", True):
        variables["generate"] = False
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


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    tools = fields.items("tools", MAX_TOOLS) or []
    if tools and len(json.dumps(tools)) > MAX_TOOL_BYTES:
        raise invalid(fields.at("tools"), f"must have at most {MAX_TOOL_BYTES} bytes together")
    for place, value in enumerate(tools):
        tool = Fields.of(value, f"{fields.at('tools')}[{place}]")
        if tool.choice("type", ("function",)) is None:
            raise tool.wrong("type", "'function'")
        function = tool.within("function")
        if function is None:
            raise tool.wrong("function", "an object")
        read_name(function)
        function.text("description")
        function.within("parameters")
    return tools


async def encode_chat(chat: Chat, text: Text, options: EdgeOptions, gone: Gone) -> Tokens:
    """Raises ApiError 400 where the conversation is too long or the template refuses it, 500 where it fails."""
    most = COUNTED * options.max_ctx
    refuse_unread(chat, text, most, options)
    try:
        return await text.encode_chat(chat.messages, most, gone, **chat.variables)
    except TooLong as error:
        raise far_too_long(error.tokens, options.max_ctx, "$.messages") from None
    except GaveUp:
        raise left() from None
    except (TemplateRefused, TemplateFailed) as error:
        raise template_error(error) from error


def refuse_unread(chat: Chat, text: Text, most: int, options: EdgeOptions) -> None:
    """What cannot fit is not even rendered. Templates may leave out what an assistant thought; no more than that."""
    knowledge, said, thought = text.tokenizer.known_plain, 0, 0
    for message in chat.messages:
        content = message["content"]
        answer = content.rpartition("</think>")[2] if message["role"] == "assistant" else content
        said += size_of(answer)
        thought += size_of(message.get("reasoning_content", "")) + len(content) - len(answer)
    if said > knowledge.most_bytes(most):
        raise far_too_long(knowledge.least(said), options.max_ctx, "$.messages")
    if thought > THOUGHTS * knowledge.most_bytes(most):
        raise far_too_long(0, options.max_ctx, "$.messages")


def template_error(error: TemplateRefused | TemplateFailed) -> ApiError:
    if isinstance(error, TemplateRefused):
        return invalid("$.messages", f"the model's chat template refuses them: {error}"[:500], "template_refused")
    no_retry = {"x-should-retry": "false"}
    message = f"The checkpoint's chat template failed: {error}"[:500]
    return ApiError(500, message, "template_error", code="template_error", headers=no_retry)


CHAT = Api("/v1/chat/completions", "chatcmpl-", read, ChatShape)
