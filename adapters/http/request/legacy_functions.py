"""Read `functions` and `function_call` of chat completions, which OpenAI's API had before `tools`.

An answer then has one call at most, without an id. The results of functions are messages of the role `function`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adapters.http.request.tool_definitions import MAX_TOOLS, choose_function, read_function, read_name
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields
from adapters.text.conversation import FunctionTool, ToolChoice

CHOICES = ("none", "auto")
FUNCTION_CHOICE = "'none', 'auto' or an object with the name of a function"


def is_choice(value: object) -> bool:
    return isinstance(value, dict) or value in CHOICES


def uses_functions(fields: Fields) -> bool:
    return bool(fields.items("functions", MAX_TOOLS))


def read_functions(fields: Fields) -> Iterator[FunctionTool]:
    listed = fields.items("functions", MAX_TOOLS) or []
    if listed and fields.items("tools", MAX_TOOLS):
        raise invalid(fields.path_of("functions"), "repeats $.tools; accepted: one of the two")
    for index, value in enumerate(listed):
        yield read_function(Fields.from_value(value, f"{fields.path_of('functions')}[{index}]"))


def read_function_choice(fields: Fields, tools: Sequence[FunctionTool]) -> ToolChoice | None:
    """Read `function_call` of a request; None: there is none."""
    match fields.read("function_call", is_choice, FUNCTION_CHOICE):
        case None:
            return None
        case "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
    asked = Fields(fields.data["function_call"], fields.path_of("function_call"))
    return choose_function(read_name(asked), tools, asked.path_of("name"))
