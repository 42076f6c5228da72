"""Poolside's templates: reasoning that the prompt opens or closes, and calls in GLM's tags, of either generation."""

from __future__ import annotations

import json

import pytest

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import (
    AnswerPiece,
    ArgumentsPiece,
    CallBegun,
    CallEnded,
    ReasoningPiece,
    TextPiece,
)
from adapters.text.answer.detect_call_form import detect_call_form, detect_reasoning
from adapters.text.conversation import FunctionTool
from adapters.text.template import ChatTemplate, ControlToken

NAMES = ["<assistant>", "</assistant>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
CONTROLS = [ControlToken(name, number) for number, name in enumerate(NAMES)]
# Laguna XS.2 writes a line for each tag, as GLM-4.5 does. Laguna 2.1 writes no line breaks, as GLM-4.7 does.
BREAKS = {"XS.2": "\n", "2.1": ""}


def make_template(line: str, default: str) -> ChatTemplate:
    call = (
        "<tool_call>{{ call.function.name }}" + line + "{% for key, value in call.function.arguments | items %}"
        "<arg_key>{{ key }}</arg_key>" + line + "<arg_value>{{ value if value is string else value | tojson }}"
        "</arg_value>" + line + "{% endfor %}</tool_call>\n"
    )
    source = (
        "{% set thinks = enable_thinking | default(" + default + ") %}{% for message in messages %}"
        "{% if message.role == 'assistant' %}<assistant>\n"
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}{% endif %}</think>\n"
        "{{ message.content }}\n{% for call in message.tool_calls or [] %}" + call + "{% endfor %}</assistant>\n"
        "{% else %}{% set tag = 'tool_response' if message.role == 'tool' else message.role %}"
        "<{{ tag }}>\n{{ message.content }}\n</{{ tag }}>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{{ '<think>' if thinks else '</think>' }}{% endif %}"
    )
    return ChatTemplate(source, CONTROLS)


@pytest.mark.parametrize("default", ["true", "false"])
@pytest.mark.parametrize("model", BREAKS)
async def test_calls_and_reasoning_are_found_in_the_template(model: str, default: str) -> None:
    template = make_template(BREAKS[model], default)
    assert await detect_call_form(template) == "glm-xml"
    assert detect_reasoning(template) == "think"
    await template.aclose()


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
TOOLS = {"read": FunctionTool("read", None, SCHEMA)}
PATH = "  if a < b:\n    <x>\n"


def join(pieces: list[AnswerPiece], kind: type) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("model", BREAKS)
def test_streamed_answers_are_read_alike_however_they_are_cut(model: str, size: int, thinks: bool) -> None:
    line = BREAKS[model]
    argument = "<arg_key>{}</arg_key>" + line + "<arg_value>{}</arg_value>" + line
    call = f"<tool_call>read{line}{argument.format('path', PATH)}{argument.format('lines', 3)}</tool_call>"
    answer = ("Let me see.</think>\n" if thinks else "\n") + f"I read.\n{call}\n{call}\n"
    reader = AnswerReader("glm-xml", TOOLS, reasoning="think", starts_in_reasoning=thinks)
    parser = reader.start_parser(lambda: "id")
    pieces = [piece for at in range(0, len(answer), size) for piece in parser.push(answer[at : at + size])]
    pieces += parser.finish()
    assert join(pieces, ReasoningPiece) == ("Let me see." if thinks else "")
    assert join(pieces, TextPiece).strip() == "I read."
    assert [piece.name for piece in pieces if isinstance(piece, CallBegun)] == ["read", "read"]
    assert sum(isinstance(piece, CallEnded) for piece in pieces) == 2
    for place in (0, 1):
        own = [piece for piece in pieces if isinstance(piece, ArgumentsPiece) and piece.index == place]
        assert json.loads(join(own, ArgumentsPiece)) == {"path": PATH, "lines": 3}
