"""Detects the form of a checkpoint's tool calls and the tags of its reasoning, from what its template writes.

The template renders a known call. The right form is the one whose parser reads that call in the result. Some parsers
accept calls without their tags. So of several forms, the one with the most tags of its own in the result is right.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from attrs import evolve

from adapters.text.answer.answer_parser import CALL_FORMS, NONE, REASONING, AnswerReader
from adapters.text.answer.answer_pieces import join_blocks
from adapters.text.conversation import (
    ChatMessage,
    Conversation,
    FunctionTool,
    ToolCall,
    build_template_variables,
    parse_arguments,
)
from adapters.text.template import ChatTemplate, ControlToken, Rendered, TemplateFailed, TemplateRefused, join_rendered

TOOL = FunctionTool(
    "callqz", "Words.", {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
)
QUESTION = ChatMessage("user", "firstqz words")
CALL = ToolCall("call12345", TOOL.name, '{"place": "placeqz"}')
ASKED = Conversation((QUESTION,), (TOOL,))
CALLED = evolve(ASKED, messages=(QUESTION, ChatMessage("assistant", calls=(CALL,))), generate=False)


async def detect_call_form(template: ChatTemplate) -> str:
    """Return the name of the form of calls, or `none` where no parser reads it."""
    try:
        asked, called = [
            await template.render(
                **build_template_variables(message, template.wants_argument_text), generate=message.generate
            )
            for message in (ASKED, CALLED)
        ]
    except (TemplateRefused, TemplateFailed):
        return NONE
    reasoning = detect_reasoning(template)
    found = dict[str, int]()
    for name, form in CALL_FORMS.items():
        reader = AnswerReader(
            name, {TOOL.name: TOOL}, reasoning=reasoning, starts_in_reasoning=opens_reasoning(asked, reasoning)
        )
        parser = reader.start_parser(lambda: CALL.id)
        written = extract_answer(asked, called, reader.visible_controls)
        if not any(closer in written for closer in form.closers):
            continue
        said = join_blocks([*parser.push(written), *parser.finish()])
        calls = [block for block in said if isinstance(block, ToolCall)]
        rest = [block for block in said if not isinstance(block, ToolCall) and block.text.strip()]
        if [(call.name, parse_arguments(call.arguments)) for call in calls] == [
            (CALL.name, parse_arguments(CALL.arguments))
        ] and not rest:
            found[name] = sum(control in written for control in form.controls)
    return max(found, key=found.__getitem__, default=NONE)


async def refuses_long_call_ids(template: ChatTemplate) -> bool:
    """Does the template refuse our ids of calls, and accept ids of nine characters? Templates of Mistral do."""
    accepted = list[bool]()
    for call_id in ("call_" + "0" * 24, CALL.id):
        call = evolve(CALL, id=call_id)
        result = ChatMessage("tool", "words", answered_call_id=call_id)
        asked = evolve(ASKED, messages=(QUESTION, ChatMessage("assistant", calls=(call,)), result))
        try:
            await template.render(**build_template_variables(asked, template.wants_argument_text))
            accepted.append(True)
        except (TemplateRefused, TemplateFailed):
            accepted.append(False)
    return accepted == [False, True]


def extract_answer(asked: Rendered, called: Rendered, seen: Collection[str]) -> str:
    """Return what the template writes for the assistant, without the control tokens that the parser would not see.

    asked, called: the prompt before the call, and the conversation with the call.
    """
    whole = join_rendered(asked)
    same = sum(
        1 for _ in takewhile(bool, (char == other for char, other in zip(whole, join_rendered(called), strict=False)))
    )
    tag = whole.rfind("<", 0, same)
    if whole.find(">", tag, same) < 0 <= tag:
        same = tag  # both continue with a tag, and the tags differ
    written = ""
    at = 0
    for piece in called:
        text = piece.content if isinstance(piece, ControlToken) else piece
        if not isinstance(piece, ControlToken) or piece.content in seen:
            written += text[max(0, same - at) :]
        at += len(text)
    return written


def opens_reasoning(prompt: Rendered, reasoning: str) -> bool:
    """Has the template opened the reasoning at the end of this prompt? Clients cannot write at the end."""
    if reasoning == NONE:
        return False
    tags = REASONING[reasoning]
    return join_rendered(prompt[-3:]).rstrip().endswith((tags.opening, tags.opening + tags.label))


def detect_reasoning(template: ChatTemplate) -> str:
    """Return the name of the reasoning tags, or `none` where the template has none."""
    return next((name for name, tags in REASONING.items() if tags.closing in template.source), NONE)
