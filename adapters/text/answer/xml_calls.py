"""Calls as Qwen3-Coder and later write them: `<tool_call><function=name><parameter=key>value</parameter>...`.

Values are bare text: what they are is the schema's to say, and where they end is the reader's to find. A value may hold
all of the tags, as code about tool calls does, and models forget or misspell the tags. So a tag ends a value only if
what follows it fits:

* A parameter ends it if its key is declared and was not given yet, or if a `</parameter>` stands before it.
* `</parameter>` ends it if another parameter, the end of the call, another call or the end of all text follows.
* `</function>` and `</tool_call>` end it if another call or the end of all text follows. If other text follows, the
  reader looks on: where another `</parameter>` or `</function>` comes that no call has opened, the value goes on.
* The beginning of another declared call ends it, unless the tags behind that call show that it was part of the value.

What is looked at is held back, so that nothing is said that has to be withdrawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from attrs import define, field

from adapters.text.answer.call_form import MAX_NAME, CallForm
from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing
from adapters.text.answer.json_reader import is_integer_only, repaired
from adapters.text.answer.schema_types import properties_of, property_of, required_of, type_name, types_of

INSIDE = re.compile(r"[^<>\n]*")
NAMED = re.compile(r"name\s*=")
CUT_TAG = re.compile(r"<parameter(=| name=)[^<>\n]*|<function(=| name=)[^<>\n]{0,128}")
QUOTED = re.compile(r"""\s*(["']?)(.*?)\1\s*""", re.DOTALL)
OPENERS = ("<tool_call>", "<function=", "<function name=")
CLOSERS = ("</parameter>", "</function>", "</tool_call>")
CALL_CLOSERS = frozenset(CLOSERS[1:])
PARAMETERS = ("<parameter=", "<parameter name=")
MOST_LOOKS = 16  # through all text, so that text made of nothing but calls takes no quadratic time
LEAST_TAG = 3  # characters of a tag at the end of all text that are taken for it


def discard(_: str) -> None:
    pass


@define(eq=False)
class XmlCalls(CallForm):
    openers = OPENERS
    controls = ("<tool_call>", "</tool_call>")
    marks = OPENERS
    closers = ("</function>", "</tool_call>")
    _name: str = field(default="", init=False)  # of the call that is read
    _given: set[str] = field(factory=set, init=False)  # its parameters so far
    _looked: int = field(default=0, init=False)  # how often all text was looked through for the end of a value
    _ending: str = field(default="", init=False)  # a line break that ends the value, unless more of it comes

    def call(self) -> Parsing[None]:
        incoming = self.incoming
        if self._opener == "<tool_call>":
            yield from incoming.matched(SPACE)
            if not (yield from self.follows_one_of(OPENERS[1:])):
                raise BrokenCall
        name = yield from self.function()
        yield from incoming.matched(SPACE)
        self._name, self._given = name, set()
        if not (yield from incoming.look(self.goes_on_as_call())):
            raise BrokenCall
        self.begin(name)
        writer = self.writer = JsonWriter(self.arguments)
        writer.open_container("{")
        key = yield from self.parameter()
        while key is not None:
            self._given.add(key)
            writer.hold(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.value(writer, types_of(property_of(self.schema(name), key), self.schema(name)))
            writer.comma(", ")
            key = yield from incoming.look(self.parameter_behind_closers())
            if key is not None:
                yield from self.parameter_behind_closers()
        writer.close_container("")
        yield from self.closing_tags()
        self.end()

    # -- tags

    def follows_one_of(self, tags: tuple[str, ...]) -> Parsing[str]:
        for tag in tags:
            if (yield from self.incoming.follows(tag)):
                return tag
        return ""

    def function(self) -> Parsing[str]:
        """The name in the tag whose beginning was taken. BrokenCall: it is no declared one."""
        written = yield from self.incoming.matched(INSIDE, MAX_NAME)
        name = unquoted(written)
        if name not in self.tools or not (yield from self.incoming.follows(">")):
            raise BrokenCall
        return name

    def goes_on_as_call(self) -> Parsing[bool]:
        """Does a parameter follow the function's tag, or the end of the call?"""
        if (yield from self.follows_one_of(CLOSERS[1:])) or self.is_cut_closer(CLOSERS[1:]):
            return True
        return (yield from self.parameter()) is not None

    def parameter_behind_closers(self) -> Parsing[str | None]:
        """The next parameter's key. The call may have been closed too early before it."""
        closed = yield from self.closing_tags()
        key = yield from self.parameter()
        return key if key is None or "</function>" not in closed or self.is_next(key) else None

    def closing_tags(self) -> Parsing[set[str]]:
        """Takes those that come next, each once, and the beginning of one at the end of all text.

        Two that close a call may stand in the wrong order; `</parameter>` behind them closes something else.
        """
        incoming, found = self.incoming, set[str]()
        wanted: tuple[str, ...] = CLOSERS
        yield from incoming.matched(SPACE)
        while tag := (yield from self.follows_one_of(wanted)):
            found.add(tag)
            wanted = tuple(tag for tag in CLOSERS[1:] if tag not in found)
            if found >= CALL_CLOSERS:
                return found
            yield from incoming.matched(SPACE)
        if self.is_cut_closer(CLOSERS):
            found.add(incoming.rest)
            incoming.at = len(incoming.text)
        return found

    def is_cut_closer(self, tags: tuple[str, ...]) -> bool:
        """Does all text end in the middle of such a tag?"""
        rest = self.incoming.rest
        return self.incoming.ended and len(rest) >= LEAST_TAG and any(tag.startswith(rest) for tag in tags)

    def is_cut_tag(self) -> bool:
        """Does all text end in the middle of a tag?"""
        if not self.incoming.ended:
            return False
        rest = self.incoming.rest.removeprefix("<tool_call>").lstrip()
        tags = (*CLOSERS, *PARAMETERS, *OPENERS)
        return CUT_TAG.fullmatch(rest) is not None or any(tag.startswith(rest) for tag in tags)

    def parameter(self) -> Parsing[str | None]:
        """Takes the tag of a parameter, and gives its key; None: there is none that can be understood.

        `<parameter=key>` and `<parameter name="key">`. `<parameter=key=`, `<parameter=key:` and `<parameter=key` at the
        end of its line are tags if the key is declared. A tag without a key is that of the only parameter that is
        required and not given yet.
        """
        incoming = self.incoming
        if not (yield from self.follows_one_of(PARAMETERS)):
            return None
        line = yield from incoming.matched(INSIDE)
        if (yield from incoming.follows(">")):
            return self.key_in_tag(line) if line.strip() else self.only_key()
        char = yield from incoming.peek()
        if char != "\n" and not (char == "<" and line.strip()):
            return None
        if line.strip():
            return self.key_before_value(line)
        key = yield from incoming.look(self.key_on_next_line())
        if key is None:
            return self.only_key()
        return (yield from self.key_on_next_line())

    def key_in_tag(self, line: str) -> str:
        key, declared = unquoted(line), properties_of(self.schema(self._name))
        if key not in declared and (less := unquoted(key.rstrip("=: "))) in declared:
            return less
        return key

    def key_on_next_line(self) -> Parsing[str | None]:
        yield from self.incoming.matched(SPACE)
        line = yield from self.incoming.matched(INSIDE)
        key = unquoted(line)
        closed = yield from self.incoming.follows(">")
        return key if closed and key in properties_of(self.schema(self._name)) else None

    def key_before_value(self, line: str) -> str | None:
        """What stands behind the key is the value's, and comes again."""
        found = re.match(r"""\s*(["']?)([^\s"'=:]+)\1[ \t]*([=:][ \t]*|\r?$)""", line)
        if found is None or found[2] not in properties_of(self.schema(self._name)):
            return None
        self.incoming.at -= len(line) - found.end()
        return found[2]

    def only_key(self) -> str | None:
        schema = self.schema(self._name)
        keys = required_of(schema) or list(properties_of(schema))
        missing = [key for key in keys if key not in self._given]
        return missing[0] if len(missing) == 1 else None

    def is_next(self, key: str) -> bool:
        """Is that a parameter which the call may still have?"""
        declared = properties_of(self.schema(self._name))
        return key not in self._given and (key in declared or not declared)

    # -- values

    def value(self, writer: JsonWriter, types: frozenset[str]) -> Parsing[None]:
        """One line break on either side belongs to the tags."""
        incoming, parts = self.incoming, list[str]()
        is_text = types <= {"string"}
        if not (yield from incoming.follows("\r\n")):
            yield from incoming.follows("\n")
        if is_text:
            writer.begin_string()
        self._ending = ""

        def say(text: str) -> None:
            if is_text:
                self.say_text(writer, text)
            else:
                parts.append(text)

        yield from self.take_value(say)
        if is_text:
            self.say_text(writer, "", last=True)
            writer.end_string()
        else:
            writer.value(as_json(re.sub(r"\r?\n\Z", "", "".join(parts)), types))

    def take_value(self, say: Callable[[str], None]) -> Parsing[None]:
        """Takes all that is the value's, and the line break that may be the tag's."""
        incoming, at_line = self.incoming, True

        def said(text: str) -> None:
            nonlocal at_line
            last = text.rpartition("\n")[2]
            at_line = not last.strip() and (at_line or len(last) < len(text))
            say(text)

        depth = 0  # calls within the value
        while word := (yield from incoming.until((*CLOSERS, *OPENERS, *PARAMETERS), said, LEAST_TAG)):
            incoming.at -= len(word)
            if not depth and (yield from incoming.look(self.ends_value(word, at_line))):
                return
            if word in OPENERS[1:]:
                depth += yield from incoming.look(self.opens_call())
            elif word == "</function>" and depth:
                depth -= 1
            incoming.at += len(word)
            said(word)

    def ends_value(self, word: str, at_line: bool) -> Parsing[bool]:
        """word: the tag that comes next.  at_line: it stands at the beginning of a line."""
        if word in CLOSERS:
            return (yield from self.closers_end_value())
        if word in OPENERS:
            if not (yield from self.incoming.look(self.opens_call())):
                return False
            if self._looked < MOST_LOOKS and (yield from self.value_goes_on(nested=True)):
                return False
            self._looked += 1
            return True
        key = yield from self.parameter()
        declared = properties_of(self.schema(self._name))
        return key is not None and self.is_next(key) and (at_line or key in declared)

    def closers_end_value(self) -> Parsing[bool]:
        incoming = self.incoming
        closed = yield from self.closing_tags()
        if closed >= CALL_CLOSERS:
            if not self.parallel:  # the answer ends with its only call
                return True
            yield from incoming.matched(SPACE)
        if not (yield from incoming.peek()) or (yield from incoming.look(self.opens_call())):
            return True
        key = yield from incoming.look(self.parameter())
        if self.is_cut_tag():
            return True
        if closed == {"</parameter>"}:
            return key is not None
        if key is not None and self.is_next(key):
            return True
        return not (yield from self.value_goes_on(nested=False))

    def opens_call(self) -> Parsing[bool]:
        """Does a declared call begin here?"""
        incoming, name = self.incoming, self._name
        if (yield from incoming.follows("<tool_call>")):
            yield from incoming.matched(SPACE)
        if not (yield from self.follows_one_of(OPENERS[1:])):
            return False
        try:
            self._name = yield from self.function()
            yield from incoming.matched(SPACE)
            return (yield from self.goes_on_as_call())
        except BrokenCall:
            return False
        finally:
            self._name = name

    def value_goes_on(self, nested: bool) -> Parsing[bool]:
        """Does a tag follow that only the end of the value can explain? nested: calls that begin may be part of it."""
        depth, words = 0, (*CLOSERS[:2], *OPENERS[1:])
        while word := (yield from self.incoming.until(words, discard)):
            if word in OPENERS:
                self.incoming.at -= len(word)
                opens = yield from self.incoming.look(self.opens_call())
                self.incoming.at += len(word)
                if opens and not nested:
                    return False
                depth += opens
            elif not depth:
                return True
            elif word == "</function>":
                depth -= 1
        return False

    def say_text(self, writer: JsonWriter, text: str, last: bool = False) -> None:
        text = self._ending + text
        found = re.search(r"\r?\n\Z|\r\Z", text)
        self._ending = "" if found is None else found[0]
        text = text[: len(text) - len(self._ending)]
        if last and self._ending == "\r":
            text += self._ending
        if text:
            writer.value(json.dumps(text, ensure_ascii=False)[1:-1])


def unquoted(text: str) -> str:
    found = QUOTED.fullmatch(text)
    return text.strip() if found is None else found[2]


def as_json(text: str, types: frozenset[str]) -> str:
    """A value of one of these types, where the text is one; else a string."""
    written = repaired(text.strip())
    if written is None:
        return json.dumps(text, ensure_ascii=False)
    value = json.loads(written)
    kind = type_name(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    if kind == "number" and is_integer_only(types) and value.is_integer():
        written, fits = str(int(value)), True
    if kind == "string" or not fits or ("string" in types and kind != "null"):
        return json.dumps(text, ensure_ascii=False)
    return written
