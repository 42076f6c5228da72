"""What an assistant's message says, however it is written: the same text, reasoning and calls are the same reading.

Clients write a call's arguments anew, with other white space, other escapes, and their members in another order. What
is compared is the JSON value.
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
from adapters.text.answer.answer_pieces import AnswerPiece, calls_of, reasoning_of, text_of
from adapters.text.conversation import DEEPEST, ChatMessage, FunctionTool, ToolCall

Tools: TypeAlias = Mapping[str, FunctionTool]
NONE: Mapping[str, Any] = MappingProxyType({})
NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")


def stripped(text: str) -> str:
    return text.strip()


@frozen
class Reading:
    """calls: their names and canonical arguments. White space around text and reasoning says nothing."""

    text: str = field(default="", converter=stripped)
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = field(default="", converter=stripped)

    @staticmethod
    def of(text: str, calls: Iterable[ToolCall], reasoning: str, tools: Tools = NONE) -> Reading:
        """tools: what may be called, so that an argument that is a default says nothing."""
        read = ((call.name, canonical(call.arguments, defaults_of(tools.get(call.name)))) for call in calls)
        return Reading(text, tuple(read), reasoning)

    @staticmethod
    def of_message(message: ChatMessage, tools: Tools = NONE) -> Reading:
        return Reading.of(message.content, message.calls, message.reasoning, tools)

    @staticmethod
    def of_pieces(pieces: Sequence[AnswerPiece], tools: Tools = NONE) -> Reading:
        return Reading.of(text_of(pieces), calls_of(pieces), reasoning_of(pieces), tools)

    def says(self, other: Reading) -> bool:
        """Is that what the other one says, whose reasoning may be left out?"""
        return evolve(self, reasoning=other.reasoning and self.reasoning) == other


def read(text: str, reader: AnswerReader) -> Reading:
    """Takes its time."""
    parser = reader.start(lambda: "")
    return Reading.of_pieces([*parser.push(text), *parser.finish()], reader.tools)


@frozen
class Utterance:
    """An assistant's message in its conversation.

    place: its number.  key: of what it says, behind what was said before it.  calls: the ids of its calls.
    """

    place: int
    key: str
    calls: tuple[str, ...]
    reading: Reading


def heard(messages: Sequence[ChatMessage], owner: str) -> tuple[list[Utterance], bytes]:
    """What the assistant has said, and a digest of all that was: for the key of what it says next. Takes its time.

    owner: whose conversation it is. Reasoning is no part of it, since many clients leave it out.
    """
    history, said = blake2b(framed("owner", owner), digest_size=32), list[Utterance]()
    for place, message in enumerate(messages):
        reading = Reading.of_message(message)
        if message.role == "assistant":
            said.append(
                Utterance(place, key_of(history.digest(), reading), tuple(one.id for one in message.calls), reading)
            )
        history.update(framed(message.role, reading.text, *flat(reading)))
    return said, history.digest()


def key_of(history: bytes, reading: Reading) -> str:
    return blake2b(history + framed(reading.text, *flat(reading)), digest_size=16).hexdigest()


def flat(reading: Reading) -> Iterable[str]:
    return (part for call in reading.calls for part in call)


def framed(*texts: str) -> bytes:
    """No other texts have these bytes."""
    parts = [text.encode(errors="surrogatepass") for text in texts]
    return b"".join(b"%d " % len(part) + part for part in (b"%d" % len(parts), *parts))


def canonical(arguments: str, defaults: Mapping[str, Any] = NONE) -> str:
    """One text for each JSON value, less its members that are defaults; what is no JSON, or nested beyond measure, is
    itself, but for the white space around it.
    """
    try:
        value = exactly(arguments or "{}")
        if isinstance(value, dict):
            said = {key: ordered(one) for key, one in value.items()}
            value = {key: value[key] for key, one in said.items() if key not in defaults or one != defaults[key]}
        return repr(ordered(value))
    except (ValueError, RecursionError):
        return "not JSON: " + arguments.strip()


def defaults_of(tool: FunctionTool | None) -> Mapping[str, Any]:
    """By its arguments: clients write those out that were left out (Claude Code's `replace_all`)."""
    properties = (tool.parameters or {}).get("properties") if tool is not None else None
    found = dict[str, Any]()
    for key, one in properties.items() if isinstance(properties, Mapping) else ():
        if isinstance(one, Mapping) and "default" in one:
            with suppress(ValueError, TypeError, RecursionError):
                found[key] = ordered(exactly(json.dumps(one["default"])))
    return found


def exactly(text: str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    return json.loads(text, parse_int=number, parse_float=number, parse_constant=refused)


def number(written: str) -> tuple[str, int]:
    """Its digits, and the power of ten that they are to be multiplied with: exact, whatever its size."""
    found = NUMBER.fullmatch(written)
    assert found is not None
    sign, whole, part, exponent = found.groups(default="")
    digits = (whole + part).lstrip("0")
    least = digits.rstrip("0")
    return (sign + least, int(exponent or 0) - len(part) + len(digits) - len(least)) if least else ("0", 0)


def ordered(value: Any, room: int = DEEPEST) -> Any:
    """Objects as their members in order. Neither these nor numbers look like anything that JSON has besides.

    Raises ValueError for what is nested deeper than `room`, wherever it is asked: a stack's end comes sooner or later.
    """
    if not room:
        raise ValueError("nested too deeply")
    match value:
        case dict():
            return ("object", *((key, ordered(value[key], room - 1)) for key in sorted(value)))
        case list():
            return [ordered(one, room - 1) for one in value]
    return value


def refused(name: str) -> None:
    raise ValueError(name)
