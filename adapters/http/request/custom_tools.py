"""Custom tools, which are called with text: read for chat completions and responses alike.

The model knows functions only, so the text is the one argument of a function, `input`. A grammar of the text is told
to the model in the tool's description, and the answer is held to it.
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


def read_custom(tool: Fields) -> FunctionTool:
    """Read what has the tool's name. Raises ApiError."""
    grammar = read_input_grammar(tool)
    description = tool.text("description")
    if grammar is not None:
        kind = "Lark grammar" if grammar.kind == "lark" else "regular expression"
        description = f"{description or ''}\n\nThe input must match this {kind}:\n{grammar.source}".strip()
    name, sent = read_name(tool), tool.data["name"]
    return FunctionTool(
        name,
        description,
        INPUT,
        client_name=None if sent == name else sent,
        input_grammar=grammar,
        path=tool.at("format"),
    )


def read_input_grammar(tool: Fields) -> Grammar | None:
    """Read the format of the input; chat completions have one more object around a grammar than responses."""
    form = tool.within("format")
    if form is None or form.choice("type", ("text", "grammar")) != "grammar":
        return None
    holder = form.within("grammar") or form
    syntax, source = holder.choice("syntax", SYNTAXES), holder.text("definition", MAX_SOURCE_CHARS)
    if syntax is None:
        raise holder.wrong("syntax", "one of " + ", ".join(map(repr, SYNTAXES)))
    if not source:
        raise invalid(holder.at("definition"), "must be a grammar, a string that is not empty")
    return Grammar("lark", source) if syntax == "lark" else Grammar("regex", source)


def custom_arguments(text: str) -> str:
    """What a custom tool is called with is text; the model knows functions only, so it is one of their arguments."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text again; all of it, where it is nothing else."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
