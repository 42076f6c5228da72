"""The items of the Responses API, read strictly into the messages of a conversation.

What one answer says comes as several items: reasoning, text, calls. They are one message of the assistant's.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, define, evolve, field

from adapters.http.apis.openai_told_items import (
    COMPACTIONS,
    SUMMARY,
    TOLD_CALLS,
    TOLD_OUTPUTS,
    TRIGGER,
    opened_summary,
    told_call,
    told_output,
)
from adapters.http.request.custom_tools import custom_arguments
from adapters.http.request.resent_history import UNNAMED_CALL, ResentHistory, Speaker, document_text
from adapters.http.request.tool_definitions import Skipped, tool_name
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.text.conversation import ChatMessage, Role, ToolCall

ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
NOT_TEXT = ("input_image", "input_file", "input_audio", "computer_screenshot")
NOT_TEXT_ITEMS = ("image_generation_call", "computer_call", "computer_call_output")
RESULTS_LEFT_OUT = ("computer_call_output",)
# What other servers' tools leave in a conversation, and what steers them: nothing that a model here could read.
UNSEEN = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response", "additional_tools"),
    *("tool_search_call", "tool_search_output", "program", "program_output", "configuration_update"),
)
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
MADE = ("message", "reasoning", *CALLS, "compaction")  # items of a response
KNOWN = ("message", *CALLS, *RESULTS, "reasoning", "item_reference")


@define(eq=False)
class Turns:
    """Items in, messages out. find: an item of an earlier response, by its id.  skipped: what was left out."""

    find: Callable[[str], Mapping[str, Any] | None]
    skipped: Skipped = field(factory=Skipped)
    _history: ResentHistory = field(default=Factory(lambda self: ResentHistory(self.skipped.changes), takes_self=True))
    _messages: list[ChatMessage] = field(factory=list)
    _told: set[str] = field(factory=set)  # ids of the calls that are text
    _triggered: bool = False  # the next summary replaces all that is no user's
    # of the answer that goes on with the next item, in parts, as there may be tens of thousands of them:
    _texts: list[str] = field(factory=list)
    _thoughts: list[str] = field(factory=list)
    _calls: list[ToolCall] = field(factory=list)
    _answering: bool = False

    def instruct(self, text: str) -> None:
        self._messages.append(ChatMessage("system", text))

    def add(self, item: Fields, *, newest: bool = False) -> None:
        """Raises ApiError naming what is wrong. newest: it is what the user has just sent, which is read strictly."""
        kind = item.data.get("type") or ("message" if item.has("role") else None)
        if kind == "item_reference" or (kind is None and item.has("id")):
            name = required(item, "id")
            found = self.find(name)
            if found is None or found.get("type") not in MADE:
                raise invalid(item.at("id"), f"there is no item {name[:80]!r} here; send the item itself")
            self.add(Fields(found, item.path))
        elif kind == "message":
            self._message(item, newest)
        elif kind == "reasoning":
            self._thoughts.append(read_reasoning(item, self._history))
            self._answering = True
        elif kind in CALLS:
            self._call(item)
        elif kind in RESULTS:
            self._result(item)
        elif kind in NOT_TEXT_ITEMS:
            self._close()
            role: Role = "user" if kind in RESULTS_LEFT_OUT else "assistant"
            self._messages.append(ChatMessage(role, self._history.leave_out(item.data)))
        else:
            self._add_other(item, kind)

    def _add_other(self, item: Fields, kind: Any) -> None:
        """Items that chat templates have no form for."""
        if kind in TOLD_CALLS:
            self._told.add(str(item.data.get("call_id") or ""))
            self._tell(told_call(item))
        elif kind in TOLD_OUTPUTS:
            self._close()
            self._messages.append(ChatMessage("user", told_output(item)))
        elif kind == TRIGGER:
            self._triggered = True
        elif kind in COMPACTIONS:
            self._summary(item)
        elif not isinstance(kind, str):
            raise item.wrong("type", "one of " + ", ".join(map(repr, KNOWN)))
        elif kind not in UNSEEN:
            self.skipped.pass_over(kind)

    def all(self) -> list[ChatMessage]:
        self._close()
        return self._messages

    def _message(self, item: Fields, newest: bool) -> None:
        if newest and item.choice("role", ROLES) is None:
            raise item.wrong("role", "one of " + ", ".join(map(repr, ROLES)))
        role = self._history.read_role(item.data.get("role"), ROLES)
        if role == "assistant":
            self._texts.append(self._history.read_text(item.data.get("content"), ""))
            self._answering = True
            return
        self._close()
        self._history.begin_message()
        content = item.data.get("content")
        text = read_parts(item, "content", "\n") if newest else self._history.read_text(content, "\n")
        self._messages.append(ChatMessage(role, text))

    def _call(self, item: Fields) -> None:
        name, namespace = item.data.get("name"), item.data.get("namespace")
        if isinstance(name, str) and name and isinstance(namespace, str):
            name = spelled(tool_name(namespace), tool_name(name))
        given: Any = item.data.get("arguments")
        if item.data.get("type") == "custom_tool_call":
            text = item.data.get("input")
            given = custom_arguments(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
        call = self._history.read_call(item.data.get("call_id"), name, given)
        if call is None:
            self._texts.append(UNNAMED_CALL)
        else:
            self._calls.append(call)
        self._answering = True

    def _tell(self, text: str) -> None:
        """Add a line of its own to what the assistant says."""
        self._texts.append("\n" * bool(self._texts and not self._texts[-1].endswith("\n")) + text + "\n")
        self._answering = True

    def _summary(self, item: Fields) -> None:
        """Read a summary that this server made. Nobody but its own server can read another one."""
        sealed = item.data.get("encrypted_content")
        text = opened_summary(sealed) if isinstance(sealed, str) else None
        if text is None:
            self.skipped.pass_over(str(item.data["type"]))
            return
        self._close()
        if self._triggered:
            self._messages = [message for message in self._messages if message.role in ("system", "user")]
        self._triggered = False
        self._messages.append(ChatMessage("user", SUMMARY + text))

    def _result(self, item: Fields) -> None:
        call = item.data.get("call_id")
        text = self._history.read_text(item.data.get("output"), "\n")
        if isinstance(call, str) and call in self._told:
            self._close()
            self._messages.append(ChatMessage("user", f"[output of the call]\n{text}"))
            return
        result = self._history.read_result(call, text, item.data.get("name"))
        self._close()
        self._messages.append(evolve(result, name=None))

    def _close(self) -> None:
        """The answer is over."""
        if self._answering:
            text, reasoning = "".join(self._texts), "".join(self._thoughts)
            self._messages.append(ChatMessage("assistant", text, reasoning, tuple(self._calls)))
        self._answering, self._texts, self._thoughts, self._calls = False, [], [], []


def spelled(namespace: str, name: str) -> str:
    """A function of a namespace as the model is told of it, which knows no namespaces."""
    return f"{namespace.removesuffix('__')}__{name}"


def read_reasoning(item: Fields, history: ResentHistory) -> str:
    """What was thought itself, else what was sealed of it by this server, else its summary."""
    content, sealed, summary = (item.data.get(name) for name in ("content", "encrypted_content", "summary"))
    if content and (thought := history.read_text(content, "")):
        return thought
    if isinstance(sealed, str) and (thought := opened(sealed)):
        return thought
    return history.read_text(summary, "\n") if summary else ""


def speaker_of(value: Any) -> Speaker:
    """Return who sends an item that nobody has looked into yet. Items that nobody reads are passed over as a system's
    messages are.
    """
    item = value if isinstance(value, dict) else {"type": "message"}
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "message":
        return ROLES.get(role, "user") if isinstance(role, str) else "user"
    if not isinstance(kind, str):
        return "system"
    if kind.endswith("_output"):
        return "tool"
    return "assistant" if kind in ("reasoning", "item_reference") or kind.endswith("_call") else "system"


def sealed(text: str) -> str:
    """What a client keeps for us without looking into it: agents send that back, and not what they could read."""
    return base64.b64encode(text.encode()).decode()


def opened(sealed: str) -> str:
    """Nothing, where another server sealed it."""
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def read_parts(item: Fields, name: str, between: str) -> str:
    content = item.data.get(name)
    if isinstance(content, str):
        return content
    if content is None:
        raise item.wrong(name, "a string or an array of parts")
    return between.join(read_part(part) for part in parts_of(item, name))


def parts_of(item: Fields, name: str) -> list[Fields]:
    return [
        Fields.of(part, f"{item.at(name)}[{place}]")
        for place, part in enumerate(item.read(name, lambda value: isinstance(value, list), "an array of parts") or [])
    ]


def read_part(part: Fields) -> str:
    kind = part.data.get("type")
    if (text := document_text(part.data)) is not None:
        return text
    if kind in NOT_TEXT:
        raise invalid(part.at("type"), f"{kind!r} parts are not supported: this server's model reads text only")
    if kind == "refusal":
        return required(part, "refusal")
    if kind not in TEXTS:
        raise part.wrong("type", "'input_text' or 'output_text'")
    return required(part, "text")


def required(item: Fields, name: str) -> str:
    value = item.text(name)
    if value is None:
        raise item.wrong(name, "a string")
    return value
