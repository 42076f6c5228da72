"""A conversation, independent of the API that it came through, and its form as variables of a chat template.

The reader of each API makes a `Conversation` of its request. `build_template_variables` is the only place that turns it
into the variables of a template. So the same conversation has the same prompt in every API.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any, Literal, TypeAlias

from attrs import evolve, field, frozen

from adapters.bounded_json import STRING_PATTERN
from effects.grammar import Grammar

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


MAX_ARGUMENT_DEPTH = 128  # nested levels in a call's arguments: twice as many as a request's body may have
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
BRACKET_DEPTHS = {"[": 1, "{": 1, "]": -1, "}": -1}


@frozen
class ToolCall:
    """A call of a function. `arguments` is JSON as it was written, so that a later prompt begins like this one."""

    id: str
    name: str
    arguments: str


@frozen
class ChatMessage:
    """One message.

    reasoning, calls: only an assistant's message has them.
    answered_call_id: the id of the call whose result this is. Only a tool's message has one.
    cuts: offsets in the content, in characters, ascending. The client says that other prompts may be the same up to
    each of them.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answered_call_id: str | None = None
    name: str | None = None
    cuts: tuple[int, ...] = ()


@frozen
class FunctionTool:
    """A function that the model may call.

    parameters: the JSON schema of its arguments.
    strict: the arguments must keep to the schema.
    client_name: the name that the client uses, if `name` is another one because no form of calls allows that name.
    input_grammar: only of a custom tool, which is called with text. Its only argument, `input`, must keep to it.
    path: the JSON path of the schema or grammar in the request, for error messages.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    client_name: str | None = None
    input_grammar: Grammar | None = None
    path: str = field(default="$.tools", eq=False)

    def to_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@frozen
class ToolChoice:
    """The tools that the answer may or must call.

    kind: with `required` the answer is one call or several; with `function` it calls the function `name`.
    allowed_names: only these functions may be called, although the template shows all. Empty: any function.
    """

    kind: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None
    allowed_names: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        return self.name in {None, name} and (not self.allowed_names or name in self.allowed_names)


@frozen
class MovedText:
    """A text that a rule moved out of the system prompt, and the message to which it was appended.

    message_index: counts the messages that follow the opening system messages.
    """

    message_index: int
    rule: str
    text: str


@frozen
class Conversation:
    """A conversation to be answered.

    parallel: one answer may hold several calls.
    variables: further variables of the template, for example `enable_thinking` (see `build_thinking_variables`).
    generate: the prompt ends with the opening of the assistant's answer.
    continues: the answer continues the last message, which is the assistant's, instead of opening a new one.

    The rest says how `stabilize.py` changed the conversation:
    applied_rules: the names of the rules that changed it.
    has_volatile_tail: later requests will not have the text after the last cut of the last message that is not the
    assistant's.
    moved_texts: the texts that later requests must have at the same places. None: they are too long to be remembered.
    messages_without_moved: the messages without the texts that were moved into them. None: nothing was moved.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[FunctionTool] = ()
    choice: ToolChoice = field(factory=ToolChoice)
    parallel: bool = True
    variables: Mapping[str, Any] = field(factory=dict)
    generate: bool = True
    continues: bool = False
    applied_rules: tuple[str, ...] = ()
    has_volatile_tail: bool = False
    moved_texts: tuple[MovedText, ...] | None = ()
    messages_without_moved: Sequence[ChatMessage] | None = None

    @property
    def callable_tools(self) -> Mapping[str, FunctionTool]:
        """The functions that the answer may call, by name."""
        return {} if self.choice.kind == "none" else {tool.name: tool for tool in self.tools}

    @property
    def lasting_messages(self) -> Sequence[ChatMessage]:
        """The messages that later requests will have as well, wherever they place the moved texts."""
        return self.messages if self.messages_without_moved is None else self.messages_without_moved

    @property
    def is_opening(self) -> bool:
        """Does it have neither answers nor tools yet? Such a request may stay the only one, as for a title."""
        said = self.messages[:-1] if self.continues else self.messages
        return not self.tools and not any(message.role in ("assistant", "tool") for message in said)


def build_thinking_variables(effort: str | None = None, enabled: bool | None = None) -> dict[str, Any]:
    """Return the template variables that say whether and how much to think. Each model family reads its own."""
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if enabled is None and effort is not None:
        enabled = effort != "none"
    return variables if enabled is None else {**variables, "enable_thinking": enabled, "thinking": enabled}


def merge_system_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with one system message at most, for templates that accept one in first place only.

    The leading system messages are joined. A later one becomes a user's message at its place. If it were moved to the
    front, it would change the beginning of every later prompt.
    """
    leading = [message.content for message in takewhile(lambda message: message.role == "system", messages)]
    rest = [
        evolve(message, role="user") if message.role == "system" else message for message in messages[len(leading) :]
    ]
    return [ChatMessage("system", "\n\n".join(leading)), *rest] if leading else rest


def shorten_call_ids(message: ChatMessage) -> ChatMessage:
    """Return the message with ids of calls that have nine letters and digits. One id always becomes the same one."""
    calls = tuple(evolve(call, id=shorten_call_id(call.id)) for call in message.calls)
    answered = message.answered_call_id
    return evolve(message, calls=calls, answered_call_id=None if answered is None else shorten_call_id(answered))


def shorten_call_id(call_id: str) -> str:
    if SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]


def build_template_variables(
    conversation: Conversation,
    argument_text: bool,
    parts: bool = False,
    one_system: bool = False,
    short_ids: bool = False,
) -> dict[str, Any]:
    """Return all variables of a template.

    argument_text: the template takes the arguments of calls as text, instead of as objects.
    parts: the template reads contents as lists of parts.
    one_system: the template accepts a system message in first place only.
    short_ids: the template accepts ids of calls only if they have nine letters and digits.
    """
    names: dict[str, str] = {}
    messages = []
    said = merge_system_messages(conversation.messages) if one_system else conversation.messages
    for message in map(shorten_call_ids, said) if short_ids else said:
        names.update((call.id, call.name) for call in message.calls)
        messages.append(build_message_variables(message, names, argument_text, parts))
    variables: dict[str, Any] = {"messages": messages, **conversation.variables}
    if conversation.callable_tools:
        variables["tools"] = [tool.to_template() for tool in conversation.tools]
    return variables


def iterate_completed(variables: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the variables of a template, completed step by step for one that fails where something is left out.

    Some templates iterate over the members of arguments, and fail where arguments are a text. Others read the
    description of every tool. Nothing is yielded where nothing is left out.
    """
    objects = {**variables, "messages": [with_object_arguments(message) for message in variables["messages"]]}
    if objects != variables:
        yield objects
    described = {**objects, "tools": [with_description(tool) for tool in variables.get("tools", ())]}
    if described["tools"] and described != objects:
        yield described


def with_object_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a template in which the arguments of every call are an object."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        written = function["arguments"]
        given = parse_arguments(written) if isinstance(written, str) else written
        arguments = given if isinstance(given, dict) else {"input": given}
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def with_description(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool that has a description and names its parameters, which may be empty."""
    function = tool["function"]
    given = function.get("parameters", {})
    parameters = {**given, "type": given.get("type", "object"), "properties": given.get("properties", {})}
    description = function.get("description", "")
    return {**tool, "function": {**function, "description": description, "parameters": parameters}}


def build_message_variables(
    message: ChatMessage, names: Mapping[str, str], argument_text: bool, parts: bool
) -> dict[str, Any]:
    """Return one message in the form that templates read. names: the functions called so far, by the call's id."""
    content: Any = [{"type": "text", "text": message.content}] if parts else message.content
    variables: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        variables["name"] = message.name
    if message.reasoning:
        variables["reasoning_content"] = message.reasoning
        if not (message.calls and message.content):  # gpt-oss reads it here, and refuses both together with calls
            variables["thinking"] = message.reasoning
    if message.calls:
        variables["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call in message.calls
            for arguments in (call.arguments if argument_text else parse_arguments(call.arguments),)
        ]
    if message.answered_call_id is not None:
        variables["tool_call_id"] = message.answered_call_id
        variables.setdefault("name", names.get(message.answered_call_id, ""))
    return variables


def parse_arguments(arguments: str) -> Any:
    """Return the object that `arguments` are as JSON, or else the text itself.

    The text is also returned for an object that cannot be written: one that is nested more than MAX_ARGUMENT_DEPTH
    levels, or that holds half of a surrogate pair.
    """
    levels = (BRACKET_DEPTHS[mark] for mark in re.findall(r"[][{}]", STRING_PATTERN.sub("", arguments)))
    if max(accumulate(levels), default=0) > MAX_ARGUMENT_DEPTH:
        return arguments
    try:
        found = json.loads(arguments)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
