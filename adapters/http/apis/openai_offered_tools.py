"""Read the tools of a request for a response, namespaces included."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, evolve, field

from adapters.http.apis.openai_response_items import join_namespace
from adapters.http.request.custom_tools import read_custom_tool
from adapters.http.request.tool_definitions import (
    MAX_TOOLS,
    SkippedTools,
    check_tools,
    map_tool_name,
    read_function,
    read_name,
)
from adapters.http.wire.fields import Fields
from adapters.text.conversation import FunctionTool


@define
class OfferedTools:
    """The tools that the model can call.

    namespaces: the namespace and name of tools that are in one. customs: the names of tools that are called with text.
    """

    tools: list[FunctionTool] = field(factory=list)
    namespaces: dict[str, tuple[str, str]] = field(factory=dict)
    customs: set[str] = field(factory=set)

    def add(self, tool: Fields, skipped: SkippedTools, namespace: str | None = None) -> None:
        kind = tool.text("type")
        if kind == "function":
            function = read_function(tool)
        elif kind == "custom":
            function = read_custom_tool(tool)
        elif kind is None:
            raise tool.wrong_value("type", "a string, such as 'function'")
        else:
            skipped.note(kind, tool.text("name"))
            return
        if namespace is not None:
            name = map_tool_name(join_namespace(map_tool_name(namespace), function.name))
            self.namespaces[name] = (namespace, function.client_name or function.name)
            function = evolve(function, name=name)
        if kind == "custom":
            self.customs.add(function.name)
        self.tools.append(function)


def read_tools(fields: Fields, skipped: SkippedTools) -> OfferedTools:
    """Return the offered tools. Tools that only other servers run are skipped and noted."""
    offered = OfferedTools()
    for tool in read_objects(fields, "tools"):
        if tool.text("type") != "namespace":
            offered.add(tool, skipped)
            continue
        read_name(tool)
        namespace = tool.data["name"]
        for inner in read_objects(tool, "tools"):
            offered.add(inner, skipped, namespace)
    check_tools(offered.tools, fields.path_of("tools"))
    return offered


def read_objects(fields: Fields, name: str) -> Iterator[Fields]:
    for index, value in enumerate(fields.items(name, MAX_TOOLS) or []):
        yield Fields.from_value(value, f"{fields.path_of(name)}[{index}]")
