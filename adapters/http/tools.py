"""Functions that an answer may call, as requests bring them: bounded, and read strictly. Shared by all APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from attrs import define, field

from adapters.http.errors import invalid
from adapters.http.fields import Fields, shown
from adapters.text.conversation import FunctionTool, ToolChoice

MAX_TOOLS = 512
MAX_TOOL_BYTES = 1 << 20
CHOICES = ("none", "auto", "required")
ENCODER = msgspec.json.Encoder()  # 31 MiB of schemas in 30 ms, and the interpreter is held so long
KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def read_name(function: Fields, name: str = "name") -> str:
    found = function.text(name, 128)
    if found is None or not NAME.fullmatch(found):
        raise function.wrong(name, "1 to 128 letters, digits or any of _ . : -")
    return found


def read_function(function: Fields, parameters: str = "parameters") -> FunctionTool:
    """parameters: what the API calls the schema of the arguments."""
    schema = function.within(parameters)
    return FunctionTool(
        read_name(function),
        function.text("description"),
        None if schema is None else schema.data,
        function.flag("strict"),
        function.at(parameters),
    )


def check_tools(tools: Sequence[FunctionTool], path: str) -> tuple[FunctionTool, ...]:
    """Raises ApiError where they are too large together, or two have one name."""
    if sum(len(ENCODER.encode(tool.written())) for tool in tools) > MAX_TOOL_BYTES:
        raise invalid(path, f"must have at most {MAX_TOOL_BYTES} bytes together")
    names = set[str]()
    for place, tool in enumerate(tools):
        if tool.name in names:
            raise invalid(f"{path}[{place}]", f"is a second function of the name {shown(tool.name)}")
        names.add(tool.name)
    return tuple(tools)


def named(name: str, tools: Sequence[FunctionTool], path: str) -> ToolChoice:
    """One function and no other. Raises ApiError where there is none of that name."""
    if name not in {tool.name for tool in tools}:
        raise invalid(path, f"{shown(name)} is none of the functions in `tools`")
    return ToolChoice("function", name)


def read_allowed(allowed: Fields, tools: Sequence[FunctionTool], within: str = "") -> ToolChoice:
    """OpenAI's `allowed_tools`. within: what of an entry has the function's name; "": the entry itself.

    Entries of other types name tools that are not offered to the model anyway.
    """
    mode, listed = allowed.choice("mode", ("auto", "required")), allowed.items("tools", MAX_TOOLS)
    if mode is None:
        raise allowed.wrong("mode", "'auto' or 'required'")
    if not listed:
        raise allowed.wrong("tools", "an array of at least one of the functions in `tools`")
    names = []
    for place, value in enumerate(listed):
        entry = Fields.of(value, f"{allowed.at('tools')}[{place}]")
        if entry.data.get("type") != "function":
            continue
        function = entry.within(within) if within else entry
        if function is None:
            raise entry.wrong(within, "an object")
        names.append(named(read_name(function), tools, function.at("name")).name)
    if not any(names):
        raise invalid(allowed.at("tools"), "names none of the functions in `tools`")
    return ToolChoice("required" if mode == "required" else "auto", None, tuple(name for name in names if name))


def needs_tools(choice: ToolChoice, tools: Sequence[FunctionTool], path: str) -> ToolChoice:
    if choice.kind == "required" and not tools:
        raise invalid(path, "asks for a call, and there is nothing in `tools`")
    return choice


def plain_choice(fields: Fields, tools: Sequence[FunctionTool]) -> ToolChoice | None:
    """`tool_choice` as OpenAI's APIs have it, where it is one of CHOICES or left out; None: it is something else."""
    match fields.data.get("tool_choice"):
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return needs_tools(ToolChoice("required"), tools, fields.at("tool_choice"))
    return None


@define
class Skipped:
    """Tools of kinds that cannot be offered to the model, since only another server runs or knows them.

    Agents send them along with their own, and go on well without: the answer's header names them, and with it the log.
    """

    kinds: dict[str, None] = field(factory=dict)

    def note(self, kind: str) -> None:
        self.kinds[kind if KIND.fullmatch(kind) else "unknown"] = None

    @property
    def headers(self) -> Mapping[str, str]:
        return {"x-rekindle-tools-left-out": " ".join(self.kinds)} if self.kinds else {}
