"""Read the functions that an answer may call, strictly and within limits. All APIs share this."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from attrs import define, field

from adapters.http.request.changes import Changes
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.conversation import FunctionTool, ToolChoice

MAX_TOOLS = 512
MAX_TOOL_BYTES = 1 << 20
OFFERED_TYPES = ("function", "custom")  # types of tools that the model is offered
CHOICES = ("none", "auto", "required")
ENCODER = msgspec.json.Encoder()  # it encodes 31 MiB of schemas in 30 ms, and holds the interpreter
MAX_KINDS = 32  # kinds of tools, and of items, that a header names
KIND_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
MAX_SENT_CHARACTERS = 1024  # characters of a tool's name as a client may send it
MAX_KEPT_CHARACTERS = 120  # characters of such a name that its mapped name keeps: 8 less than a name may have


def read_name(function: Fields, name: str = "name") -> str:
    """Return the name that the model knows a tool by. Raises ApiError where there is none."""
    found = function.text(name, MAX_SENT_CHARACTERS)
    if not found:
        raise function.wrong_value(
            name, "1 to 128 letters, digits or any of _ . : - (others are mapped to such a name)"
        )
    return map_tool_name(found)


def map_tool_name(sent: str) -> str:
    """Map a client's name of a tool to one that the forms of calls allow.

    An allowed name stays. Any other name is mapped by itself alone, so prompts stay the same from request to request.
    Characters such as `/` become `_`, and a digest of six digits keeps two names apart.
    """
    if not sent or NAME_PATTERN.fullmatch(sent):
        return sent
    digest = blake2b(sent.encode(errors="surrogatepass"), digest_size=3).hexdigest()
    return f"{NOT_IN_NAME.sub('_', sent[:MAX_KEPT_CHARACTERS])}_{digest}"


def find_sent_name(tools: Mapping[str, FunctionTool], name: str) -> str:
    """Map a name back to the client's name of the tool. tools: by the names that the model knows."""
    tool = tools.get(name)
    return name if tool is None or tool.client_name is None else tool.client_name


def read_function(function: Fields, parameters: str = "parameters") -> FunctionTool:
    """Read a function. parameters: what the API calls the schema of the arguments."""
    schema = function.read_object(parameters)
    name = read_name(function)
    sent = function.data["name"]
    return FunctionTool(
        name,
        function.text("description"),
        None if schema is None else schema.data,
        function.flag("strict"),
        client_name=None if sent == name else sent,
        path=function.path_of(parameters),
    )


def check_tools(tools: Sequence[FunctionTool], path: str) -> tuple[FunctionTool, ...]:
    """Return the tools. Raises ApiError if they are too large together, or if two have one name."""
    if sum(len(ENCODER.encode(tool.to_template())) for tool in tools) > MAX_TOOL_BYTES:
        raise invalid(path, f"must have at most {MAX_TOOL_BYTES} bytes together")
    names = set[str]()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise invalid(f"{path}[{index}]", f"is a second function with the name {quote_value(tool.name)}")
        names.add(tool.name)
    return tuple(tools)


def choose_function(name: str, tools: Sequence[FunctionTool], path: str) -> ToolChoice:
    """Return the choice of one function and no other. Raises ApiError if no function has the name."""
    if name not in {tool.name for tool in tools}:
        raise invalid(path, f"{quote_value(name)} is none of the functions in `tools`")
    return ToolChoice("function", name)


def read_allowed(allowed: Fields, tools: Sequence[FunctionTool], within: bool = False) -> ToolChoice:
    """Read OpenAI's `allowed_tools`. within: an entry has the name in an object that is called like its type.

    Entries of other types name tools that the model is not offered.
    """
    mode = allowed.choice("mode", ("auto", "required"))
    listed = allowed.items("tools", MAX_TOOLS)
    if mode is None:
        raise allowed.wrong_value("mode", "'auto' or 'required'")
    if not listed:
        raise allowed.wrong_value("tools", "an array of at least one of the functions in `tools`")
    names = []
    for index, value in enumerate(listed):
        entry = Fields.from_value(value, f"{allowed.path_of('tools')}[{index}]")
        kind = entry.data.get("type")
        if kind not in OFFERED_TYPES:
            continue
        function = entry.read_object(kind) if within else entry
        if function is None:
            raise entry.wrong_value(kind, "an object")
        names.append(choose_function(read_name(function), tools, function.path_of("name")).name)
    if not any(names):
        raise invalid(allowed.path_of("tools"), "names none of the functions in `tools`")
    return ToolChoice("required" if mode == "required" else "auto", None, tuple(name for name in names if name))


def require_tools(choice: ToolChoice, tools: Sequence[FunctionTool], path: str) -> ToolChoice:
    if choice.kind == "required" and not tools:
        raise invalid(path, "asks for a call, but `tools` is empty")
    return choice


def read_plain_choice(fields: Fields, tools: Sequence[FunctionTool]) -> ToolChoice | None:
    """Read `tool_choice` of OpenAI's APIs if it is absent or one of CHOICES. Return None if it is anything else."""
    match fields.data.get("tool_choice"):
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return require_tools(ToolChoice("required"), tools, fields.path_of("tool_choice"))
    return None


@define
class SkippedTools:
    """The parts of a request that were left out or changed, as the answer's headers and the log name them.

    Most are tools that cannot be offered to the model, since only another server runs them or only its models know
    them. Agents send them along with their own tools, and work well without them.

    kinds: types of the skipped tools. names: of those skipped tools that have one. item_kinds: types of skipped items
    of a conversation, which are no tools. skipped_choice: what the request wanted to be called and what was skipped,
    as `find_skipped_choice` returns it, so that the model chooses.
    """

    kinds: dict[str, None] = field(factory=dict)
    names: set[str] = field(factory=set)
    item_kinds: dict[str, None] = field(factory=dict)
    skipped_choice: str = ""
    changes: Changes = field(factory=Changes)  # changes in the rest of the request

    def note(self, kind: str, name: str | None = None) -> None:
        """Note a skipped tool, of `tools`. Its kind and its name decide later whether `tool_choice` asks for it."""
        self.kinds[kind if KIND_PATTERN.fullmatch(kind) else "unknown"] = None
        if name is not None:
            self.names.add(name)

    def pass_over(self, kind: str) -> None:
        """Note a skipped item of the conversation, of a kind that the model cannot be given. It is no tool."""
        if len(self.item_kinds) < MAX_KINDS:
            self.item_kinds[kind if KIND_PATTERN.fullmatch(kind) else "unknown"] = None

    def find_fallback(self, choice: Any, tools: Sequence[FunctionTool]) -> ToolChoice | None:
        """Return the choice for a request that wants a skipped tool to be called: the model chooses.

        choice: `tool_choice`, as any API has it. Returns None if the request wants no skipped tool.
        """
        wanted = (
            self.find_skipped_choice(choice, {tool.client_name or tool.name for tool in tools}) if self.kinds else ""
        )
        if not wanted:
            return None
        self.skipped_choice = wanted if KIND_PATTERN.fullmatch(wanted) else "unknown"
        return ToolChoice()

    def find_skipped_choice(self, choice: Any, offered: Collection[str]) -> str:
        """Return what a choice asks for if only skipped tools could serve it, or else an empty string.

        choice: as in `find_fallback`. offered: the client's names of the tools that the model is offered. The result is
        the name of a skipped tool or the type of one, where the choice says so. It is "required" if any tool was to be
        called and none is offered, and "allowed_tools" if all tools of such a list are skipped.
        """
        match choice:
            case "required" | {"type": "any"} if not offered:
                return "required"
            case {"type": "allowed_tools", "tools": [*listed]}:
                kinds = {
                    tool["type"] for tool in listed if isinstance(tool, dict) and isinstance(tool.get("type"), str)
                }
                return "allowed_tools" if kinds and not kinds & set(OFFERED_TYPES) else ""
            case {"type": "function" | "custom" | "tool", "name": str(name)}:
                return name if name in self.names and name not in offered else ""
            case {"type": str(kind)}:
                # `web_search_preview` is asked for by clients that declare `web_search`, and the other way round
                is_known = any(known.startswith(kind) or kind.startswith(known) for known in self.kinds)
                return kind if is_known else ""
        return ""

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {
            "x-rekindle-tools-left-out": " ".join([*self.kinds][:MAX_KINDS]),
            "x-rekindle-items-left-out": " ".join(self.item_kinds),
            "x-rekindle-tool-choice": self.skipped_choice and f"auto; {self.skipped_choice} is left out",
        }
        return {**{name: value for name, value in headers.items() if value}, **self.changes.headers}
