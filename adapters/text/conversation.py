"""A conversation, whichever API it came in by, and what a chat template reads of it.

Each API's reader makes a `Conversation` of its request; `templated` is the one place where it becomes the variables of
a template. Tools are written the same way whoever sent them, so the same conversation has the same prompt in every API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any, Literal, TypeAlias

from attrs import evolve, field, frozen

from adapters.bounded_json import TEXTS
from effects.grammar import Grammar

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


DEEPEST = 128  # levels of a call's arguments: twice what a request's body may have
LEVELS = {"[": 1, "{": 1, "]": -1, "}": -1}


@frozen
class ToolCall:
    """`arguments`: JSON as it was written, so that a conversation's prompt only ever grows."""

    id: str
    name: str
    arguments: str


@frozen
class ChatMessage:
    """reasoning, calls: an assistant's.  answers: the id of the call whose result a tool's message is.

    cuts: places in the content, ascending, up to where other prompts may have the same, as the client says.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None
    name: str | None = None
    cuts: tuple[int, ...] = ()


@frozen
class FunctionTool:
    """A function that the model may call.

    parameters: the JSON schema of its arguments.  strict: arguments are held to it.  sent_as: the client's name for it,
    where `name` is another one because no form of calls allows the client's.  input_grammar: of a custom tool, which is
    called with text: its only argument, `input`, is held to it.  path: of the schema or grammar in the request.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    sent_as: str | None = None
    input_grammar: Grammar | None = None
    path: str = field(default="$.tools", eq=False)

    def written(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@frozen
class ToolChoice:
    """`required`: some call, or several; `function`: of the one that is named.

    allowed: of these functions only, though the template shows all; empty: of any.
    """

    kind: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        return self.name in {None, name} and (not self.allowed or name in self.allowed)


@frozen
class MovedText:
    """A text that a rule took out of the system prompt, and the message that it stands behind: its number among those
    that follow the opening system messages.
    """

    place: int
    rule: str
    text: str


@frozen
class Conversation:
    """parallel: may one answer hold several calls?
    variables: further ones of the template, `enable_thinking` say (see `thinking`).
    generate: the prompt ends with the opening of the assistant's answer.
    continues: the answer goes on with the last message, which is the assistant's, instead of opening one.
    stabilized: the rules by which it is another than was sent (`stabilize.py`).  tail: from the last cut on of the
    last message that is not the assistant's, no later request will have it.  moved: what later requests are to have
    where it stands now; None: too much to be remembered.  unmoved: its messages, less all that was moved there.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[FunctionTool] = ()
    choice: ToolChoice = field(factory=ToolChoice)
    parallel: bool = True
    variables: Mapping[str, Any] = field(factory=dict)
    generate: bool = True
    continues: bool = False
    stabilized: tuple[str, ...] = ()
    tail: bool = False
    moved: tuple[MovedText, ...] | None = ()
    unmoved: Sequence[ChatMessage] | None = None

    @property
    def callable(self) -> Mapping[str, FunctionTool]:
        """What the answer may call, by name."""
        return {} if self.choice.kind == "none" else {tool.name: tool for tool in self.tools}

    @property
    def lasting(self) -> Sequence[ChatMessage]:
        """Its messages as later requests will have them, wherever those say what was moved."""
        return self.messages if self.unmoved is None else self.unmoved

    @property
    def opens(self) -> bool:
        """Is nothing answered in it yet, and nothing there to call? It may be all that there is: a title, a summary."""
        said = self.messages[:-1] if self.continues else self.messages
        return not self.tools and not any(message.role in ("assistant", "tool") for message in said)


def thinking(effort: str | None = None, enabled: bool | None = None) -> dict[str, Any]:
    """Variables by which templates are told whether and how much to think; each family reads its own of them."""
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if enabled is None and effort is not None:
        enabled = effort != "none"
    return variables if enabled is None else {**variables, "enable_thinking": enabled, "thinking": enabled}


def with_one_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """For templates that know a system message in the first place only, while agents send them in between.

    Those at the start become one. Later ones become the user's, where they are: moved to the front they would change
    what every prompt of the conversation begins with.
    """
    leading = [message.content for message in takewhile(lambda message: message.role == "system", messages)]
    rest = [
        evolve(message, role="user") if message.role == "system" else message for message in messages[len(leading) :]
    ]
    return [ChatMessage("system", "\n\n".join(leading)), *rest] if leading else rest


def templated(
    conversation: Conversation, argument_text: bool, parts: bool = False, one_system: bool = False
) -> dict[str, Any]:
    """All that a template is told. argument_text: it writes the arguments of calls as the text that they were.

    parts: it reads contents as lists of parts.  one_system: it knows no system message but the first.
    """
    names: dict[str, str] = {}
    messages = []
    for message in with_one_system(conversation.messages) if one_system else conversation.messages:
        names.update((call.id, call.name) for call in message.calls)
        messages.append(templated_message(message, names, argument_text, parts))
    told: dict[str, Any] = {"messages": messages, **conversation.variables}
    if conversation.callable:
        told["tools"] = [tool.written() for tool in conversation.tools]
    return told


def with_object_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Messages as a template is told of them, with an object for all arguments that are none; None: all are objects.

    For templates that go through the members of arguments and fail where there are none.
    """
    changed, found = list[Mapping[str, Any]](), False
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            given = parsed(function["arguments"]) if isinstance(function["arguments"], str) else function["arguments"]
            if not isinstance(given, dict):
                given, found = {"input": given}, True
            calls.append({**call, "function": {**function, "arguments": given}})
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed if found else None


def templated_message(
    message: ChatMessage, names: Mapping[str, str], argument_text: bool, parts: bool
) -> dict[str, Any]:
    """names: of the functions called so far, by the call's id."""
    content: Any = [{"type": "text", "text": message.content}] if parts else message.content
    told: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        told["name"] = message.name
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call in message.calls
            for arguments in (call.arguments if argument_text else parsed(call.arguments),)
        ]
    if message.answers is not None:
        told["tool_call_id"] = message.answers
        told.setdefault("name", names.get(message.answers, ""))
    return told


def parsed(arguments: str) -> Any:
    """The object that they are; the text where they are none, or one that nobody could write: nested beyond measure, or
    with half of a surrogate pair.
    """
    levels = (LEVELS[mark] for mark in re.findall(r"[][{}]", TEXTS.sub("", arguments)))
    if max(accumulate(levels), default=0) > DEEPEST:
        return arguments
    try:
        found = json.loads(arguments)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
