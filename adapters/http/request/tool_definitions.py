"""Functions that an answer may call, as requests bring them: bounded, and read strictly. Shared by all APIs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from attrs import define, field

from adapters.http.request.changes import Changes
from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, shown
from adapters.text.conversation import FunctionTool, ToolChoice

MAX_TOOLS = 512
MAX_TOOL_BYTES = 1 << 20
CALLED = ("function", "custom")  # types of tools that the model is offered
CHOICES = ("none", "auto", "required")
ENCODER = msgspec.json.Encoder()  # 31 MiB of schemas in 30 ms, and the interpreter is held so long
MAX_KINDS = 32  # of tools, and of items, that a header names
KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
OTHERS = re.compile(r"[^A-Za-z0-9_.:-]")
MOST_SENT = 1024  # characters of a tool's name as a client may send it
MOST_KEPT = 120  # characters of such a name that its mapped name keeps: 8 less than a name may have


def read_name(function: Fields, name: str = "name") -> str:
    """Return the name that the model knows a tool by. Raises ApiError where there is none."""
    found = function.text(name, MOST_SENT)
    if not found:
        raise function.wrong(name, "1 to 128 letters, digits or any of _ . : - (others are mapped to such a name)")
    return tool_name(found)


def tool_name(sent: str) -> str:
    """Map a client's name of a tool to one that the forms of calls allow.

    A name that is allowed stays. Any other one depends on nothing but itself, so prompts stay the same from request to
    request: `/` and the like become `_`, and a digest of six digits keeps two names apart.
    """
    if not sent or NAME.fullmatch(sent):
        return sent
    digest = blake2b(sent.encode(errors="surrogatepass"), digest_size=3).hexdigest()
    return f"{OTHERS.sub('_', sent[:MOST_KEPT])}_{digest}"


def sent_name(tools: Mapping[str, FunctionTool], name: str) -> str:
    """Map a name back to what its client calls the tool. tools: by the names that the model knows."""
    tool = tools.get(name)
    return name if tool is None or tool.client_name is None else tool.client_name


def read_function(function: Fields, parameters: str = "parameters") -> FunctionTool:
    """parameters: what the API calls the schema of the arguments."""
    schema, name = function.within(parameters), read_name(function)
    sent = function.data["name"]
    return FunctionTool(
        name,
        function.text("description"),
        None if schema is None else schema.data,
        function.flag("strict"),
        client_name=None if sent == name else sent,
        path=function.at(parameters),
    )


def check_tools(tools: Sequence[FunctionTool], path: str) -> tuple[FunctionTool, ...]:
    """Raises ApiError where they are too large together, or two have one name."""
    if sum(len(ENCODER.encode(tool.to_template())) for tool in tools) > MAX_TOOL_BYTES:
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


def read_allowed(allowed: Fields, tools: Sequence[FunctionTool], within: bool = False) -> ToolChoice:
    """OpenAI's `allowed_tools`. within: an entry has the name in an object that is called like its type.

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
        kind = entry.data.get("type")
        if kind not in CALLED:
            continue
        function = entry.within(kind) if within else entry
        if function is None:
            raise entry.wrong(kind, "an object")
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
    names: of those tools that have one.  items: kinds of items of a conversation that were passed over.  choice: what
    the request wanted to be called, where that was left out, so that the model chooses.
    """

    kinds: dict[str, None] = field(factory=dict)
    names: set[str] = field(factory=set)
    items: dict[str, None] = field(factory=dict)
    choice: str = ""
    changes: Changes = field(factory=Changes)  # of the rest of the request

    def note(self, kind: str, name: str | None = None) -> None:
        self.kinds[kind if KIND.fullmatch(kind) else "unknown"] = None
        if name is not None:
            self.names.add(name)

    def pass_over(self, kind: str) -> None:
        """Note an item of a kind that the model cannot be told of."""
        if len(self.items) < MAX_KINDS:
            self.items[kind if KIND.fullmatch(kind) else "unknown"] = None

    def fallback(self, choice: Any, tools: Sequence[FunctionTool]) -> ToolChoice | None:
        """Return the choice that serves a request for a tool that was left out: the model chooses.

        choice: `tool_choice`, as any API has it.  None: the request asks for nothing that was left out.
        """
        wanted = self.left_out(choice, {tool.client_name or tool.name for tool in tools}) if self.kinds else ""
        if not wanted:
            return None
        self.choice = wanted if KIND.fullmatch(wanted) else "unknown"
        return ToolChoice()

    def left_out(self, choice: Any, offered: Collection[str]) -> str:
        """Return what of a choice was left out."""
        match choice:
            case "required" | {"type": "any"} if not offered:
                return "required"
            case {"type": "allowed_tools", "tools": [*listed]}:
                kinds = {one["type"] for one in listed if isinstance(one, dict) and isinstance(one.get("type"), str)}
                return "allowed_tools" if kinds and not kinds & set(CALLED) else ""
            case {"type": "function" | "custom" | "tool", "name": str(name)}:
                return name if name in self.names and name not in offered else ""
            case {"type": str(kind)}:
                # `web_search_preview` is asked for by clients that declare `web_search`, and the other way round
                return kind if any(one.startswith(kind) or kind.startswith(one) for one in self.kinds) else ""
        return ""

    @property
    def headers(self) -> Mapping[str, str]:
        told = {
            "x-rekindle-tools-left-out": " ".join([*self.kinds][:MAX_KINDS]),
            "x-rekindle-items-left-out": " ".join(self.items),
            "x-rekindle-tool-choice": self.choice and f"auto; {self.choice} is left out",
        }
        return {**{name: value for name, value in told.items() if value}, **self.changes.headers}
