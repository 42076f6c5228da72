"""The grammar of a whole answer: reasoning, where there may be any, then the form that was asked for or calls."""

from __future__ import annotations

import json
from collections.abc import Container

from adapters.text.answer.answer_parser import REASONING, AnswerReader
from adapters.text.answer.argument_grammar import ANY_TEXT, Rules, content
from adapters.text.answer.call_rules import CALL_RULES, Calls, tag
from adapters.text.conversation import FunctionTool
from effects.grammar import Grammar


def answer_grammar(reader: AnswerReader, form: Grammar | None, controls: Container[str]) -> Grammar | None:
    """None: anything may be answered. controls: what the tokenizer knows as tokens of their own.

    Tools whose `strict` is set are held to their schema: `settle.py` decides which. Rules that a client wrote are of
    the whole answer. A required call leaves no room for anything else. Raises GrammarRefused.
    """
    if form is not None and form.kind == "lark":
        return form
    calls = calls_of(reader, controls) if form is not None or held(reader) else None
    if calls is None:
        if form is None or reader.reasoning not in REASONING:
            return form
        body = [f"body: {content(form)}"]
    elif must_call(reader):
        body = ["body: calls", *calls.rules]
    elif form is not None:
        body = [f"body: {content(form)} | calls", *calls.rules]
    else:
        body = [*calls.behind_text(), *calls.rules]
    return Grammar("lark", "\n".join([*thoughts(reader, controls), *body]))


def must_call(reader: AnswerReader) -> bool:
    return reader.choice.kind in {"required", "function"}


def held(reader: AnswerReader) -> bool:
    """Do calls keep to anything?"""
    strict = any(tool.strict or tool.input_grammar for tool in reader.tools.values())
    return must_call(reader) or bool(reader.choice.allowed) or strict


def check_arguments(reader: AnswerReader, tool: FunctionTool) -> None:
    """Raises GrammarRefused where the form of calls cannot hold what the tool's schema says."""
    written = CALL_RULES.get(reader.calls)
    if written is not None and written.named.fullmatch(tool.name):
        written.arguments(tool, Rules())


def calls_of(reader: AnswerReader, controls: Container[str]) -> Calls | None:
    if not reader.tools or reader.calls not in CALL_RULES:
        return None
    tools = [tool for tool in reader.tools.values() if reader.choice.allows(tool.name)]
    return Calls(CALL_RULES[reader.calls], tools, tuple(reader.tools), reader.parallel, controls)


def thoughts(reader: AnswerReader, controls: Container[str]) -> list[str]:
    """Where an answer may begin with them."""
    tags = REASONING.get(reader.reasoning)
    if tags is None:
        return ["start: body"]
    opened = "thought" if reader.thinking else f"({tag(tags.opening, controls)} thought)?"
    until = [f"thought: ANY {tags.closing} SPACE?", f"ANY: {ANY_TEXT}"]  # a token of its own is no part of any text
    if tags.closing not in controls:
        until = ["thought: until SPACE?", f"until[suffix={json.dumps(tags.closing)}]: {ANY_TEXT}"]
    return [f"start: {opened} body", *until, r"SPACE: /\s{1,4}/"]
