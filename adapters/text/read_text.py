"""Compares assistant messages by their meaning: by text, reasoning and calls, however they are written.

Clients write the arguments of a call anew, with other white space, other escapes and their members in another order.
So the JSON values are compared. `recall_tokens.py` uses this to find the tokens of earlier answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias

from attrs import evolve, field, frozen

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import AnswerPiece, collect_calls, join_reasoning, join_text
from adapters.text.conversation import MAX_ARGUMENT_DEPTH, ChatMessage, FunctionTool, ToolCall

Tools: TypeAlias = Mapping[str, FunctionTool]
NONE: Mapping[str, Any] = MappingProxyType({})
NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")


def strip_text(text: str) -> str:
    return text.strip()


@frozen
class Reading:
    """The meaning of an assistant's message.

    calls: the name and the canonical arguments of each call. White space around text and reasoning is ignored.
    """

    text: str = field(default="", converter=strip_text)
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = field(default="", converter=strip_text)

    @staticmethod
    def from_parts(text: str, calls: Iterable[ToolCall], reasoning: str, tools: Tools = NONE) -> Reading:
        """Build a reading. tools: the callable functions. An argument that equals its default is ignored."""
        read = (
            (call.name, canonicalize_arguments(call.arguments, read_defaults(tools.get(call.name)))) for call in calls
        )
        return Reading(text, tuple(read), reasoning)

    @staticmethod
    def from_message(message: ChatMessage, tools: Tools = NONE) -> Reading:
        return Reading.from_parts(message.content, message.calls, message.reasoning, tools)

    @staticmethod
    def from_pieces(pieces: Sequence[AnswerPiece], tools: Tools = NONE) -> Reading:
        return Reading.from_parts(join_text(pieces), collect_calls(pieces), join_reasoning(pieces), tools)

    def matches(self, other: Reading) -> bool:
        """Is the meaning the same as that of `other`, which may lack the reasoning?"""
        return evolve(self, reasoning=other.reasoning and self.reasoning) == other


def read_answer(text: str, reader: AnswerReader) -> Reading:
    """Parse an answer and return its meaning. This is slow for a long text: call it in a thread."""
    parser = reader.start_parser(lambda: "")
    return Reading.from_pieces([*parser.push(text), *parser.finish()], reader.tools)


@frozen
class AssistantTurn:
    """An assistant's message in its conversation.

    message_index: its index among the messages.
    key: identifies the meaning of this message and of all messages before it.
    calls: the ids of its calls.
    """

    message_index: int
    key: str
    calls: tuple[str, ...]
    reading: Reading


def read_history(messages: Sequence[ChatMessage], owner: str) -> tuple[list[AssistantTurn], bytes]:
    """Return the assistant's messages, and a digest of all messages, from which the next answer's key is made.

    This is slow for a long conversation: call it in a thread. Reasoning is not part of a key or the digest, since many
    clients leave it out.

    owner: a name for the API key whose conversation this is.
    """
    history = blake2b(frame_texts("owner", owner), digest_size=32)
    said = list[AssistantTurn]()
    for index, message in enumerate(messages):
        reading = Reading.from_message(message)
        if message.role == "assistant":
            said.append(
                AssistantTurn(
                    index, turn_key(history.digest(), reading), tuple(call.id for call in message.calls), reading
                )
            )
        history.update(frame_texts(message.role, reading.text, *flatten_calls(reading)))
    return said, history.digest()


def turn_key(history: bytes, reading: Reading) -> str:
    return blake2b(history + frame_texts(reading.text, *flatten_calls(reading)), digest_size=16).hexdigest()


def flatten_calls(reading: Reading) -> Iterable[str]:
    return (part for call in reading.calls for part in call)


def frame_texts(*texts: str) -> bytes:
    """Encode texts with their lengths, so that no other texts give the same bytes."""
    parts = [text.encode(errors="surrogatepass") for text in texts]
    return b"".join(b"%d " % len(part) + part for part in (b"%d" % len(parts), *parts))


def canonicalize_arguments(arguments: str, defaults: Mapping[str, Any] = NONE) -> str:
    """Return one text for each JSON value. Members that equal their default are left out.

    Text that is not JSON, or that is nested too deeply, is returned without the white space around it.
    """
    try:
        value = parse_exactly(arguments or "{}")
        if isinstance(value, dict):
            said = {key: to_comparable(argument) for key, argument in value.items()}
            value = {
                key: value[key] for key, argument in said.items() if key not in defaults or argument != defaults[key]
            }
        return repr(to_comparable(value))
    except (ValueError, RecursionError):
        return "not JSON: " + arguments.strip()


def read_defaults(tool: FunctionTool | None) -> Mapping[str, Any]:
    """Return the defaults of a tool's arguments. Some clients add defaults that the model left out.

    One example is `replace_all` of Claude Code.
    """
    properties = (tool.parameters or {}).get("properties") if tool is not None else None
    found = dict[str, Any]()
    for key, schema in properties.items() if isinstance(properties, Mapping) else ():
        if isinstance(schema, Mapping) and "default" in schema:
            with suppress(ValueError, TypeError, RecursionError):
                found[key] = to_comparable(parse_exactly(json.dumps(schema["default"])))
    return found


def parse_exactly(text: str) -> Any:
    """Parse JSON with exact numbers. Raises ValueError."""
    return json.loads(text, parse_int=parse_number, parse_float=parse_number, parse_constant=refuse_constant)


def parse_number(written: str) -> tuple[str, int]:
    """Return the digits of a number and its power of ten. This is exact for any size."""
    found = NUMBER.fullmatch(written)
    assert found is not None
    sign, whole, part, exponent = found.groups(default="")
    digits = (whole + part).lstrip("0")
    least = digits.rstrip("0")
    return (sign + least, int(exponent or 0) - len(part) + len(digits) - len(least)) if least else ("0", 0)


def to_comparable(value: Any, room: int = MAX_ARGUMENT_DEPTH) -> Any:
    """Return a value in which every object is a tuple of its members in order.

    Neither such a tuple nor an exact number can be mistaken for another JSON value. Raises ValueError for a value that
    is nested more than `room` levels. The interpreter's own limit depends on how deep its stack already is.
    """
    if not room:
        raise ValueError("nested too deeply")
    match value:
        case dict():
            return ("object", *((key, to_comparable(value[key], room - 1)) for key in sorted(value)))
        case list():
            return [to_comparable(item, room - 1) for item in value]
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(name)
