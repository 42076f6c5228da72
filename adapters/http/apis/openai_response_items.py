"""Read the items of the Responses API strictly into the messages of a conversation.

One answer comes as several items: reasoning, text, calls. They become one message of the assistant.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, define, evolve, field

from adapters.http.apis.openai_items_as_text import (
    COMPACTIONS,
    DESCRIBED_CALLS,
    DESCRIBED_OUTPUTS,
    SUMMARY,
    TRIGGER,
    describe_call,
    describe_output,
    open_summary,
)
from adapters.http.request.custom_tools import encode_custom_arguments
from adapters.http.request.resent_history import UNNAMED_CALL, ResentHistory, Speaker, extract_document_text
from adapters.http.request.tool_definitions import SkippedTools, map_tool_name
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ChatMessage, Role, ToolCall

ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
NOT_TEXT = ("input_image", "input_file", "input_audio", "computer_screenshot")
NOT_TEXT_ITEMS = ("image_generation_call", "computer_call", "computer_call_output")
RESULTS_LEFT_OUT = ("computer_call_output",)
# What other servers' tools leave in a conversation, and what steers them: nothing that a model here could read.
IGNORED_ITEMS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response", "additional_tools"),
    *("tool_search_call", "tool_search_output", "program", "program_output", "configuration_update"),
)
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
RESPONSE_ITEMS = ("message", "reasoning", *CALLS, "compaction")  # the items that a response can have
ACCEPTED_ITEMS = ("message", *CALLS, *RESULTS, "reasoning", "item_reference")


@define(eq=False)
class ConversationBuilder:
    """Takes items, and returns messages. find: returns an item of an earlier response by its id. skipped: records what
    was skipped.
    """

    find: Callable[[str], Mapping[str, Any] | None]
    skipped: SkippedTools = field(factory=SkippedTools)
    _history: ResentHistory = field(default=Factory(lambda self: ResentHistory(self.skipped.changes), takes_self=True))
    _messages: list[ChatMessage] = field(factory=list)
    _text_calls: set[str] = field(factory=set)  # ids of the calls that became text
    _replaces_history: bool = False  # the next summary replaces all messages but the user's
    # Parts of the answer that the next item continues. There may be tens of thousands of them.
    _texts: list[str] = field(factory=list)
    _thoughts: list[str] = field(factory=list)
    _calls: list[ToolCall] = field(factory=list)
    _is_answering: bool = False

    def add_instructions(self, text: str) -> None:
        self._messages.append(ChatMessage("system", text))

    def add(self, item: Fields, *, newest: bool = False) -> None:
        """Add an item. newest: the user has just sent it, so it is read strictly. Raises ApiError naming what is
        wrong.
        """
        kind = item.data.get("type") or ("message" if item.has("role") else None)
        if kind == "item_reference" or (kind is None and item.has("id")):
            name = read_required(item, "id")
            found = self.find(name)
            if found is None or found.get("type") not in RESPONSE_ITEMS:
                raise invalid(item.path_of("id"), f"there is no item {name[:80]!r} here; send the item itself")
            self.add(Fields(found, item.path))
        elif kind == "message":
            self._add_message(item, newest)
        elif kind == "reasoning":
            self._thoughts.append(read_reasoning(item, self._history))
            self._is_answering = True
        elif kind in CALLS:
            self._add_call(item)
        elif kind in RESULTS:
            self._add_result(item)
        elif kind in NOT_TEXT_ITEMS:
            self._close_answer()
            role: Role = "user" if kind in RESULTS_LEFT_OUT else "assistant"
            self._messages.append(ChatMessage(role, self._history.leave_out(item.data)))
        else:
            self._add_other(item, kind)

    def _add_other(self, item: Fields, kind: Any) -> None:
        """Add an item for which chat templates have no form."""
        if kind in DESCRIBED_CALLS:
            self._text_calls.add(str(item.data.get("call_id") or ""))
            self._add_line(describe_call(item))
        elif kind in DESCRIBED_OUTPUTS:
            self._close_answer()
            self._messages.append(ChatMessage("user", describe_output(item)))
        elif kind == TRIGGER:
            self._replaces_history = True
        elif kind in COMPACTIONS:
            self._add_summary(item)
        elif not isinstance(kind, str):
            raise item.wrong_value("type", "one of " + ", ".join(map(repr, ACCEPTED_ITEMS)))
        elif kind not in IGNORED_ITEMS:
            self.skipped.pass_over(kind)

    def finish(self) -> list[ChatMessage]:
        self._close_answer()
        return self._messages

    def _add_message(self, item: Fields, newest: bool) -> None:
        if newest and item.choice("role", ROLES) is None:
            raise item.wrong_value("role", "one of " + ", ".join(map(repr, ROLES)))
        role = self._history.read_role(item.data.get("role"), ROLES)
        if role == "assistant":
            self._texts.append(self._history.read_text(item.data.get("content"), ""))
            self._is_answering = True
            return
        self._close_answer()
        self._history.begin_message()
        content = item.data.get("content")
        text = read_parts(item, "content", "\n") if newest else self._history.read_text(content, "\n")
        self._messages.append(ChatMessage(role, text))

    def _add_call(self, item: Fields) -> None:
        name = item.data.get("name")
        namespace = item.data.get("namespace")
        if isinstance(name, str) and name and isinstance(namespace, str):
            name = join_namespace(map_tool_name(namespace), map_tool_name(name))
        given: Any = item.data.get("arguments")
        if item.data.get("type") == "custom_tool_call":
            text = item.data.get("input")
            given = encode_custom_arguments(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
        call = self._history.read_call(item.data.get("call_id"), name, given)
        if call is None:
            self._texts.append(UNNAMED_CALL)
        else:
            self._calls.append(call)
        self._is_answering = True

    def _add_line(self, text: str) -> None:
        """Add a line of its own to the assistant's text."""
        self._texts.append("\n" * bool(self._texts and not self._texts[-1].endswith("\n")) + text + "\n")
        self._is_answering = True

    def _add_summary(self, item: Fields) -> None:
        """Add a summary that this server made. Only the server that made a summary can read it."""
        sealed = item.data.get("encrypted_content")
        text = open_summary(sealed) if isinstance(sealed, str) else None
        if text is None:
            self.skipped.pass_over(str(item.data["type"]))
            return
        self._close_answer()
        if self._replaces_history:
            self._messages = [message for message in self._messages if message.role in ("system", "user")]
        self._replaces_history = False
        self._messages.append(ChatMessage("user", SUMMARY + text))

    def _add_result(self, item: Fields) -> None:
        call = item.data.get("call_id")
        text = self._history.read_text(item.data.get("output"), "\n")
        if isinstance(call, str) and call in self._text_calls:
            self._close_answer()
            self._messages.append(ChatMessage("user", f"[output of the call]\n{text}"))
            return
        result = self._history.read_result(call, text, item.data.get("name"))
        self._close_answer()
        self._messages.append(evolve(result, name=None))

    def _close_answer(self) -> None:
        """End the answer that consists of the items so far."""
        if self._is_answering:
            text = "".join(self._texts)
            reasoning = "".join(self._thoughts)
            self._messages.append(ChatMessage("assistant", text, reasoning, tuple(self._calls)))
        self._is_answering = False
        self._texts = []
        self._thoughts = []
        self._calls = []


def join_namespace(namespace: str, name: str) -> str:
    """Return the name of a function in a namespace as the model knows it, which knows no namespaces."""
    return f"{namespace.removesuffix('__')}__{name}"


def read_reasoning(item: Fields, history: ResentHistory) -> str:
    """Return the reasoning itself, or what this server sealed of it, or its summary."""
    content, sealed, summary = (item.data.get(name) for name in ("content", "encrypted_content", "summary"))
    if content and (thought := history.read_text(content, "")):
        return thought
    if isinstance(sealed, str) and (thought := open_sealed_text(sealed)):
        return thought
    return history.read_text(summary, "\n") if summary else ""


def guess_speaker(value: Any) -> Speaker:
    """Return the speaker of an item that was not read yet. Items that are never read count as the system's, which are
    skipped.
    """
    item = value if isinstance(value, dict) else {"type": "message"}
    kind = item.get("type") or "message"
    role = item.get("role")
    if kind == "message":
        return ROLES.get(role, "user") if isinstance(role, str) else "user"
    if not isinstance(kind, str):
        return "system"
    if kind.endswith("_output"):
        return "tool"
    return "assistant" if kind in ("reasoning", "item_reference") or kind.endswith("_add_call") else "system"


def seal_text(text: str) -> str:
    """Return reasoning in the form that a client keeps unread. Agents send that back, and not what they could read."""
    return base64.b64encode(text.encode()).decode()


def open_sealed_text(sealed: str) -> str:
    """Return the text again; an empty one if another server sealed it."""
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def read_parts(item: Fields, name: str, between: str) -> str:
    content = item.data.get(name)
    if isinstance(content, str):
        return content
    if content is None:
        raise item.wrong_value(name, "a string or an array of parts")
    return between.join(read_part(part) for part in split_parts(item, name))


def split_parts(item: Fields, name: str) -> list[Fields]:
    return [
        Fields.from_value(part, f"{item.path_of(name)}[{index}]")
        for index, part in enumerate(item.read(name, lambda value: isinstance(value, list), "an array of parts") or [])
    ]


def read_part(part: Fields) -> str:
    kind = part.data.get("type")
    if (text := extract_document_text(part.data)) is not None:
        return text
    if kind in NOT_TEXT:
        raise invalid(part.path_of("type"), f"{kind!r} parts are not supported: this server's model reads text only")
    if kind == "refusal":
        return read_required(part, "refusal")
    if kind not in TEXTS:
        raise part.wrong_value("type", "'input_text' or 'output_text'")
    return read_required(part, "text")


def read_required(item: Fields, name: str) -> str:
    value = item.text(name)
    if value is None:
        raise item.wrong_value(name, "a string")
    return value
