"""The grammar of a whole answer: reasoning, if there may be any, and then the requested form or tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping

from adapters.text.answer.answer_parser import REASONING, AnswerReader
from adapters.text.answer.rules.argument_grammar import ANY_TEXT, GeneratedRules, format_content
from adapters.text.answer.rules.call_rules import CALL_RULES, CallSection
from adapters.text.answer.rules.harmony_rules import build_harmony_grammar
from adapters.text.conversation import FunctionTool
from adapters.text.template import ControlToken
from effects.grammar import Grammar


def build_answer_grammar(
    reader: AnswerReader, form: Grammar | None, controls: Mapping[str, ControlToken]
) -> Grammar | None:
    """Return the grammar of an answer. None: any answer is allowed. Raises GrammarRefused.

    Calls of tools with `strict` keep to their schema: `fitted_form.py` decides which tools these are. Rules that a
    client wrote apply to the whole answer. Where a call is required, the answer can be nothing else.

    controls: the control tokens, by their texts.
    """
    if form is not None and form.kind == "lark":
        return form
    if reader.calls == "harmony":
        if form is None and not constrains_calls(reader):
            return None
        tools = [tool for tool in reader.tools.values() if reader.choice.allows(tool.name)]
        return build_harmony_grammar(tools, form, controls, must_call=must_call(reader))
    calls = build_call_section(reader, controls) if form is not None or constrains_calls(reader) else None
    if calls is None:
        if form is None or reader.reasoning not in REASONING:
            return form
        body = [f"body: {format_content(form)}"]
    elif must_call(reader):
        body = ["body: calls", *calls.rules]
    elif form is not None:
        body = [f"body: {format_content(form)} | calls", *calls.rules]
    else:
        body = [*calls.write_rules_after_text(), *calls.rules]
    return Grammar("lark", "\n".join([*write_reasoning_rules(reader, controls), *body]))


def must_call(reader: AnswerReader) -> bool:
    return reader.choice.kind in {"required", "function"}


def constrains_calls(reader: AnswerReader) -> bool:
    """Are calls constrained in any way?"""
    strict = any(tool.strict or tool.input_grammar for tool in reader.tools.values())
    return must_call(reader) or bool(reader.choice.allowed_names) or strict


def check_arguments(reader: AnswerReader, tool: FunctionTool) -> None:
    """Raise GrammarRefused where the form of calls cannot express the tool's schema."""
    written = CALL_RULES.get(reader.calls)
    if written is not None and written.name_pattern.fullmatch(tool.name):
        written.write_arguments(tool, GeneratedRules())


def build_call_section(reader: AnswerReader, controls: Mapping[str, ControlToken]) -> CallSection | None:
    if not reader.tools or reader.calls not in CALL_RULES:
        return None
    tools = [tool for tool in reader.tools.values() if reader.choice.allows(tool.name)]
    return CallSection(CALL_RULES[reader.calls], tools, tuple(reader.tools), reader.parallel, controls)


def write_reasoning_rules(reader: AnswerReader, controls: Mapping[str, ControlToken]) -> list[str]:
    """Return the rules by which an answer may begin with reasoning."""
    tags = REASONING.get(reader.reasoning)
    if tags is None:
        return ["start: body"]
    rules = GeneratedRules(controls)
    label = f"{json.dumps(tags.label)} " if tags.label else ""
    begun = f"({rules.write_text(tags.opening)} {label}thought)?"
    opened = "thought" if reader.starts_in_reasoning else begun
    # No text contains a control token.
    until = [f"thought: ANY {rules.write_text(tags.closing)} SPACE?", f"ANY: {ANY_TEXT}"]
    if tags.closing not in controls:
        until = ["thought: until SPACE?", f"until[suffix={json.dumps(tags.closing)}]: {ANY_TEXT}"]
    return [f"start: {opened} body", *until, r"SPACE: /\s{1,4}/"]
