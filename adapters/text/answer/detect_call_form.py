"""Which form a checkpoint's tool calls have, and how it marks reasoning: what its own template writes tells it.

The template renders a call that is known, and whichever parser reads that call in what it wrote is the one.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from attrs import evolve

from adapters.text.answer.answer_parser import CALL_FORMS, NONE, REASONING, AnswerReader
from adapters.text.answer.answer_pieces import blocks
from adapters.text.conversation import ChatMessage, Conversation, FunctionTool, ToolCall, parsed, templated
from adapters.text.template import ChatTemplate, Control, Rendered, TemplateFailed, TemplateRefused, text_of

TOOL = FunctionTool(
    "callqz", "Words.", {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
)
QUESTION = ChatMessage("user", "firstqz words")
CALL = ToolCall("call12345", TOOL.name, '{"place": "placeqz"}')
ASKED = Conversation((QUESTION,), (TOOL,))
CALLED = evolve(ASKED, messages=(QUESTION, ChatMessage("assistant", calls=(CALL,))), generate=False)


async def detect_calls(template: ChatTemplate) -> str:
    """The name of the form; `none` where no parser knows it."""
    try:
        asked, called = [
            await template.render(**templated(one, template.wants_argument_text), generate=one.generate)
            for one in (ASKED, CALLED)
        ]
    except (TemplateRefused, TemplateFailed):
        return NONE
    reasoning = detect_reasoning(template)
    for name in CALL_FORMS:
        reader = AnswerReader(name, {TOOL.name: TOOL}, reasoning=reasoning, thinking=opened(asked, reasoning))
        parser = reader.start(lambda: CALL.id)
        written = answer(asked, called, reader.controls)
        if not any(closer in written for closer in CALL_FORMS[name].closers):
            continue  # some forms read calls without their tags, and no template writes those
        said = blocks([*parser.push(written), *parser.finish()])
        calls = [block for block in said if isinstance(block, ToolCall)]
        rest = [block for block in said if not isinstance(block, ToolCall) and block.text.strip()]
        if [(call.name, parsed(call.arguments)) for call in calls] == [
            (CALL.name, parsed(CALL.arguments))
        ] and not rest:
            return name
    return NONE


def answer(asked: Rendered, called: Rendered, seen: Collection[str]) -> str:
    """What the template lets the assistant write, less the control tokens that a form would not see."""
    whole = text_of(asked)
    same = sum(1 for _ in takewhile(bool, (one == other for one, other in zip(whole, text_of(called), strict=False))))
    tag = whole.rfind("<", 0, same)
    if whole.find(">", tag, same) < 0 <= tag:
        same = tag  # both go on with one, and not with the same
    written, at = "", 0
    for piece in called:
        text = piece.content if isinstance(piece, Control) else piece
        if not isinstance(piece, Control) or piece.content in seen:
            written += text[max(0, same - at) :]
        at += len(text)
    return written


def opened(prompt: Rendered, reasoning: str) -> bool:
    """Has the template begun the reasoning itself? Nothing that a client typed is at the end of a prompt."""
    return reasoning != NONE and text_of(prompt[-3:]).rstrip().endswith(REASONING[reasoning].opening)


def detect_reasoning(template: ChatTemplate) -> str:
    """The name of the tags; `none` where the template knows none."""
    return next((name for name, tags in REASONING.items() if tags.closing in template.source), NONE)
