"""Calls as Qwen3-Coder and later write them: `<tool_call><function=name><parameter=key>value</parameter>...`.

Values are bare text, so what they are is the schema's to say. Strings are passed on as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from adapters.text.answer.form import MAX_NAME, SPACE, CallForm
from adapters.text.answer.incoming import BrokenCall, Parsing

INSIDE = re.compile(r"[^<>\n]*")
PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates write values as Python does
KINDS: Mapping[str, Any] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
MOST_READ = 64  # schemas that are looked at for the types of one value


@define(eq=False)
class XmlCalls(CallForm):
    openers = ("<tool_call>", "<function=")
    controls = ("<tool_call>", "</tool_call>")
    _value: str = field(default="", init=False)  # white space that ends the value, unless more of it comes

    def call(self) -> Parsing[None]:
        incoming = self.incoming
        if self._opener == "<tool_call>":
            yield from incoming.matched(SPACE)
            if not (yield from incoming.follows("<function=")):
                raise BrokenCall
        name = yield from incoming.matched(INSIDE, MAX_NAME)
        if not (yield from incoming.follows(">")):
            raise BrokenCall
        self.begin(name.strip())
        self.arguments("{")
        tool = self.tools.get(name.strip())
        schema = (tool.parameters if tool is not None else None) or {}
        separator = ""
        yield from incoming.matched(SPACE)
        while (yield from incoming.follows("<parameter=")):
            key = (yield from incoming.matched(INSIDE)).strip()
            if not (yield from incoming.follows(">")):
                raise BrokenCall
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.value(types_of(property_of(schema, key), schema))
            separator = ", "
        if not (yield from incoming.follows("</function>")):
            raise BrokenCall
        self.arguments("}")
        self.end()
        yield from incoming.matched(SPACE)
        yield from incoming.follows("</tool_call>")

    def value(self, types: frozenset[str]) -> Parsing[None]:
        """One line break on either side belongs to the tags."""
        incoming, parts = self.incoming, list[str]()
        is_text = types <= {"string"}
        yield from incoming.follows("\n")
        if is_text:
            self.arguments('"')
        self._value = ""
        say = self.say_text if is_text else parts.append
        while True:
            closer = yield from incoming.until(("</parameter>",), say)
            if not closer:
                raise BrokenCall
            space = yield from incoming.matched(SPACE)
            if (yield from self.closes()):
                break
            say(closer + space)  # somebody writes about these tags
        if is_text:
            self.say_text("", last=True)
            self.arguments('"')
        else:
            self.arguments(as_json("".join(parts).removesuffix("\n"), types))

    def closes(self) -> Parsing[bool]:
        """Is that the end of the value? Then another one follows, or the end of the call."""
        incoming = self.incoming
        for word in ("<parameter=", "</function>", "</tool_call>"):
            if (yield from incoming.follows(word)):
                incoming.at -= len(word)
                return True
        return not (yield from incoming.peek())

    def say_text(self, text: str, last: bool = False) -> None:
        text = self._value + text
        self._value = "" if last or not text.endswith("\n") else "\n"
        self.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def property_of(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema has room for; none where it does not say."""
    found, waiting, seen = set[str](), [schema], set[int]()
    for one in waiting:  # references may lead in circles, and each way round through many more
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        if len(seen) == MOST_READ:
            return frozenset()
        seen.add(id(one))
        named = one.get("type")
        reference = one.get("$ref")
        constants = one.get("enum", [one["const"]] if "const" in one else None)
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found.update(kind for kind in named if isinstance(kind, str))
        elif isinstance(reference, str):
            waiting.append(resolved(reference, root))
        elif isinstance(constants, list):
            found.update(map(type_name, constants))
        else:
            for word in ("anyOf", "oneOf", "allOf"):
                options = one.get(word)
                waiting += options[: MOST_READ + 1] if isinstance(options, list) else ()
    return frozenset(found)


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """A reference into the same schema."""
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def type_name(value: Any) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(value, kind)), "string")


def as_json(text: str, types: frozenset[str]) -> str:
    """A value of one of these types, where the text is one; else a string."""
    written = PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(written, parse_constant=_refused)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = type_name(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    fits = fits or (kind == "number" and "integer" in types and value.is_integer())
    if kind == "string" or not fits or ("string" in types and kind != "null"):
        return json.dumps(text, ensure_ascii=False)
    return written


def _refused(name: str) -> None:
    raise ValueError(name)
