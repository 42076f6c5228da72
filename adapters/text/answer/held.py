"""The grammar of a whole answer: reasoning, where there may be any, then the form that was asked for or calls."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from adapters.text.answer.reader import REASONING, AnswerReader
from adapters.text.answer.xml_calls import property_of, types_of
from adapters.text.conversation import FunctionTool
from adapters.text.grammar import json_grammar
from effects.grammar import Grammar

ANY = "/(?s:.*)/"
# Of each form of calls that has a grammar: the tags around a call, and what its arguments are called.
XML = "qwen-xml"
FORMS = {
    "hermes": ("<tool_call>", "</tool_call>", "arguments"),
    "llama3-json": ("", "", "parameters"),
    XML: ("<tool_call>", "</tool_call>", ""),
}
KEY = re.compile(r"[^<>\s]{1,128}")


def answer_grammar(reader: AnswerReader, form: Grammar | None, controls: Container[str]) -> Grammar | None:
    """None: anything may be answered. controls: what the tokenizer knows as tokens of their own.

    Rules that a client wrote are of the whole answer. A required call leaves no room for anything else; what may be
    text or calls is told apart by a token of its own, or not at all.
    """
    if form is not None and form.kind == "lark":
        return form
    callable_ = bool(reader.tools) and reader.calls in FORMS
    if callable_ and reader.choice.kind in {"required", "function"}:
        rules = ["body: calls", *calls(reader, controls)]
    elif form is not None and callable_:
        rules = [f"body: {content(form)} | calls", *calls(reader, controls)]
    elif form is not None:
        if reader.reasoning not in REASONING:
            return form
        rules = [f"body: {content(form)}"]
    elif callable_ and FORMS[reader.calls][0] in controls and (strict(reader) or reader.choice.allowed):
        rules = ["body: FREE calls?", f"FREE: {ANY}", *calls(reader, controls)]
    else:
        return None
    return Grammar("lark", "\n".join([*thoughts(reader, controls), *rules]))


def strict(reader: AnswerReader) -> bool:
    """Do arguments keep to their schemas wherever something is called? Those that are bare text cannot."""
    return reader.calls != XML and any(tool.strict for tool in reader.tools.values())


def thoughts(reader: AnswerReader, controls: Container[str]) -> list[str]:
    """Where an answer may begin with them."""
    tags = REASONING.get(reader.reasoning)
    if tags is None:
        return ["start: body"]
    opened = "thought" if reader.thinking else f"({tag(tags.opening, controls)} thought)?"
    until = [f"thought: ANY {tags.closing} SPACE?", f"ANY: {ANY}"]  # a token of its own is no part of any text
    if tags.closing not in controls:
        until = ["thought: until SPACE?", f"until[suffix={json.dumps(tags.closing)}]: {ANY}"]
    return [f"start: {opened} body", *until, r"SPACE: /\s{1,4}/"]


def calls(reader: AnswerReader, controls: Container[str]) -> list[str]:
    """One, or several on lines of their own where there may be and tags tell them apart."""
    opening, closing, arguments = FORMS[reader.calls]
    several = reader.parallel and bool(opening)
    around = (f'{tag(opening, controls)} "\\n"', f'"\\n" {tag(closing, controls)}') if opening else ("", "")
    tools = [tool for tool in reader.tools.values() if reader.choice.allows(tool.name)]
    bodies = " | ".join(f"call{number}" for number in range(len(tools)))
    return [
        'calls: call ("\\n" call)*' if several else "calls: call",
        f"call: {around[0]} ({bodies}) {around[1]}",
        *(
            f"call{number}: {call(tool, arguments) if arguments else xml_call(tool)}"
            for number, tool in enumerate(tools)
        ),
        *([] if arguments else [f'value[suffix="\\n</parameter>"]: {ANY}']),
    ]


def call(tool: FunctionTool, arguments: str) -> str:
    """Written as templates write it. Arguments keep to their schema where the client says `strict`."""
    schema = tool.parameters if tool.strict and tool.parameters else {"type": "object"}
    head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
    return f'{json.dumps(head)} {content(json_grammar(schema))} "}}"'


def xml_call(tool: FunctionTool) -> str:
    """Parameters in the schema's order, those that it requires in any case, and their values of its types."""
    schema = tool.parameters or {}
    named, needed = schema.get("properties"), schema.get("required")
    keys = [key for key in named if KEY.fullmatch(key)] if isinstance(named, Mapping) else []
    parts = [json.dumps(f"<function={tool.name}>\n")]
    for key in keys:
        value = xml_value(property_of(schema, key), schema)
        part = f"{json.dumps(f'<parameter={key}>' + chr(10))} {value} {json.dumps(chr(10))}"
        parts.append(part if isinstance(needed, list) and key in needed else f"({part})?")
    if not keys:
        parts.append(r'("<parameter=" /[^<>\s]{1,128}/ ">\n" value "\n")*')
    return " ".join([*parts, '"</function>"'])


def xml_value(schema: object, root: Mapping[str, Any]) -> str:
    """With the tag behind it."""
    types, allowed = types_of(schema, root), schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(allowed, list) and allowed and all(isinstance(one, str) for one in allowed):
        return "(" + " | ".join(map(json.dumps, allowed)) + r') "\n</parameter>"'
    if types and "string" not in types:
        return rf'%json {json.dumps({"type": sorted(types)})} "\n</parameter>"'
    return "value"


def content(form: Grammar) -> str:
    """A part of a rule."""
    if form.kind == "json_schema":
        return f"%json {form.source}"
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], form.source, flags=re.DOTALL)
    return f"/{escaped}/"


def tag(text: str, controls: Container[str]) -> str:
    return text if text in controls else json.dumps(text)
