"""Read custom tools, which are called with text, for chat completions and responses alike.

The model knows functions only, so the text becomes the one argument of a function, `input`. A grammar of the text is
written into the tool's description, and the answer is held to it.
"""

from __future__ import annotations

import json

from adapters.http.request.tool_definitions import read_name
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import MAX_SOURCE_CHARS
from effects.grammar import Grammar

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SYNTAXES = ("lark", "regex")


def read_custom_tool(tool: Fields) -> FunctionTool:
    """Read an object with a custom tool's name, description and format. Raises ApiError."""
    grammar = read_input_grammar(tool)
    description = tool.text("description")
    if grammar is not None:
        kind = "Lark grammar" if grammar.kind == "lark" else "regular expression"
        description = f"{description or ''}\n\nThe input must match this {kind}:\n{grammar.source}".strip()
    name = read_name(tool)
    sent = tool.data["name"]
    return FunctionTool(
        name,
        description,
        INPUT,
        client_name=None if sent == name else sent,
        input_grammar=grammar,
        path=tool.path_of("format"),
    )


def read_input_grammar(tool: Fields) -> Grammar | None:
    """Read the format of the input. Chat completions have one more object around a grammar than responses."""
    form = tool.read_object("format")
    if form is None or form.choice("type", ("text", "grammar")) != "grammar":
        return None
    holder = form.read_object("grammar") or form
    syntax = holder.choice("syntax", SYNTAXES)
    source = holder.text("definition", MAX_SOURCE_CHARS)
    if syntax is None:
        raise holder.wrong_value("syntax", "one of " + ", ".join(map(repr, SYNTAXES)))
    if not source:
        raise invalid(holder.path_of("definition"), "must be a grammar, a string that is not empty")
    return Grammar("lark", source) if syntax == "lark" else Grammar("regex", source)


def encode_custom_arguments(text: str) -> str:
    """Return the text that a custom tool is called with as arguments of a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def extract_custom_input(arguments: str) -> str:
    """Return the text again out of the arguments. If they hold anything else, return all of them."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
