"""Parses calls whose arguments stand in tags, as Qwen3-Coder, Seed-OSS, MiniMax-M2 and GLM write them.

Qwen's are `<tool_call><function=name><parameter=key>value</parameter>...`, and `call_tags.py` has the tags of all.

The problem: values are bare text. The schema says of which type they are, and the parser must find where they end. A
value may contain all of the tags, as code about tool calls does. Models also forget or misspell the tags.

The idea: a tag ends a value only if the text after it fits.

* A parameter ends it if its key is declared and was not given yet, or if a `</parameter>` stands before it.
* `</parameter>` ends it if another parameter, the end of the call, another call or the end of all text follows.
* `</function>` and `</tool_call>` end it if another call, the end of all text, or a declared parameter that was not
  given yet follows. If other text follows, the parser looks further. The value continues if another `</parameter>` or
  `</function>` comes that no call has opened.
* Where the answer may have one call only, all tags that close a call end the value at once, whatever follows.
* The beginning of another declared call ends it, unless the tags after that call show that it was part of the value.

The text that the parser looks at is held back, so that nothing has to be withdrawn.

A parameter that is given twice has its last value, as in the parsers of mlx-lm, which fill a dictionary. The first
value was passed on already, so the arguments have the key twice, and JSON parsers take the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import ClassVar

from attrs import define, field

from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.forms.call_form import MAX_NAME, CallForm
from adapters.text.answer.forms.call_tags import QWEN, CallTags, unquote
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing
from adapters.text.answer.json_reader import to_json_value
from adapters.text.answer.schema_types import collect_types, declared_properties, find_property, required_properties

INSIDE = re.compile(r"[^<>\n]*")
NAMED = re.compile(r"name\s*=")
MAX_SEARCHES = 16  # of all text, so that a text that consists of calls does not take quadratic time
MIN_CUT_TAG_CHARS = 3  # this many characters of a tag at the end of all text count as the tag


def ignore_text(_: str) -> None:
    pass


@define(eq=False)
class XmlCalls(CallForm):
    """Parses Qwen's calls. Other forms have other tags, which say what opens and closes their calls."""

    tags: ClassVar[CallTags] = QWEN
    openers = QWEN.openers
    controls: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    marks = QWEN.openers
    closers = QWEN.call_closers
    _name: str = field(default="", init=False)  # of the current call
    _given: set[str] = field(factory=set, init=False)  # parameters of the current call so far
    _search_count: int = field(default=0, init=False)  # how often all text was searched for the end of a value
    # A line break that belongs to the closing tag, unless more text of the value comes.
    _ending: str = field(default="", init=False)

    def __init_subclass__(cls) -> None:
        cls.openers = cls.tags.openers
        cls.marks = cls.tags.openers
        cls.closers = cls.tags.call_closers

    def parse_call(self) -> Parsing[None]:
        incoming = self.incoming
        if self._opener not in self.tags.functions:
            yield from incoming.take_matching(SPACE)
            if not (yield from self.take_one_of(self.tags.functions)):
                raise BrokenCall
        name = yield from self.take_function_name()
        yield from incoming.take_matching(SPACE)
        self._name = name
        self._given = set()
        if not (yield from incoming.run_lookahead(self.continues_as_call())):
            raise BrokenCall
        self.begin_call(name)
        writer = self.writer = JsonWriter(self.add_arguments)
        writer.open_container("{")
        key = yield from self.take_parameter()
        while key is not None:
            self._given.add(key)
            writer.hold_text(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.parse_value(
                writer, collect_types(find_property(self.parameters_of(name), key), self.parameters_of(name))
            )
            writer.hold_comma(", ")
            key = yield from incoming.run_lookahead(self.take_parameter_after_closers())
            if key is not None:
                yield from self.take_parameter_after_closers()
        writer.close_container("")
        yield from self.take_closing_tags()
        self.end_call()

    # -- tags

    def take_one_of(self, tags: tuple[str, ...]) -> Parsing[str]:
        for tag in tags:
            if (yield from self.incoming.take_if_next(tag)):
                return tag
        return ""

    def take_function_name(self) -> Parsing[str]:
        """Take the rest of a function's tag and return the name. Raises BrokenCall for a name that is not declared."""
        written = yield from self.incoming.take_matching(INSIDE, MAX_NAME)
        name = unquote(written)
        if name not in self.tools or not (yield from self.incoming.take_if_next(">")):
            raise BrokenCall
        return name

    def continues_as_call(self) -> Parsing[bool]:
        """Does a parameter follow the function's tag, or the end of the call?"""
        if (yield from self.take_one_of(self.tags.call_closers)) or self.is_cut_closer(self.tags.call_closers):
            return True
        return (yield from self.take_parameter()) is not None

    def take_parameter_after_closers(self) -> Parsing[str | None]:
        """Take closing tags and the next parameter's tag, and return its key. A model may close a call too early."""
        closed = yield from self.take_closing_tags()
        key = yield from self.take_parameter()
        return key if key is None or self.tags.closers[1] not in closed or self.may_follow(key) else None

    def take_closing_tags(self) -> Parsing[set[str]]:
        """Take the closing tags that come next, each once, and the beginning of one at the end of all text.

        The two tags that close a call may stand in the wrong order. A `</parameter>` after them closes something else.
        """
        incoming = self.incoming
        found = set[str]()
        wanted = self.tags.closers
        yield from incoming.take_matching(SPACE)
        while tag := (yield from self.take_one_of(wanted)):
            found.add(tag)
            wanted = tuple(tag for tag in self.tags.call_closers if tag not in found)
            if not wanted:
                return found
            yield from incoming.take_matching(SPACE)
        if self.is_cut_closer(self.tags.closers):
            found.add(incoming.rest)
            incoming.position = len(incoming.text)
        return found

    def is_cut_closer(self, tags: tuple[str, ...]) -> bool:
        """Does all text end inside one of these tags?"""
        rest = self.incoming.rest
        return self.incoming.ended and len(rest) >= MIN_CUT_TAG_CHARS and any(tag.startswith(rest) for tag in tags)

    def is_cut_tag(self) -> bool:
        """Does all text end inside any tag?"""
        if not self.incoming.ended:
            return False
        rest = self.incoming.rest.removeprefix(self.tags.wrapper).lstrip()
        tags = (*self.tags.closers, *self.tags.parameters, *self.tags.openers)
        return self.tags.cut_tag.fullmatch(rest) is not None or any(tag.startswith(rest) for tag in tags)

    def take_parameter(self) -> Parsing[str | None]:
        """Take the tag of a parameter and return its key, or None where there is no such tag.

        A tag is `<parameter=key>` or `<parameter name="key">`. If the key is declared, `<parameter=key=`,
        `<parameter=key:` and `<parameter=key` at the end of its line are tags, too. A tag without a key stands for the
        only required parameter that was not given yet.
        """
        incoming = self.incoming
        if not (yield from self.take_one_of(self.tags.parameters)):
            return None
        line = yield from incoming.take_matching(INSIDE)
        if (yield from incoming.take_if_next(">")):
            return self.read_key_in_tag(line) if line.strip() else self.find_only_key()
        char = yield from incoming.peek()
        if char != "\n" and not (char == "<" and line.strip()):
            return None
        if line.strip():
            return self.read_key_before_value(line)
        key = yield from incoming.run_lookahead(self.read_key_on_next_line())
        if key is None:
            return self.find_only_key()
        return (yield from self.read_key_on_next_line())

    def read_key_in_tag(self, line: str) -> str:
        key = unquote(line)
        declared = declared_properties(self.parameters_of(self._name))
        if key not in declared and (less := unquote(key.rstrip("=: "))) in declared:
            return less
        return key

    def read_key_on_next_line(self) -> Parsing[str | None]:
        yield from self.incoming.take_matching(SPACE)
        line = yield from self.incoming.take_matching(INSIDE)
        key = unquote(line)
        closed = yield from self.incoming.take_if_next(">")
        return key if closed and key in declared_properties(self.parameters_of(self._name)) else None

    def read_key_before_value(self, line: str) -> str | None:
        """Return the key in a line that continues with the value. The value is parsed afterwards."""
        found = re.match(r"""\s*(["']?)([^\s"'=:]+)\1[ \t]*([=:][ \t]*|\r?$)""", line)
        if found is None or found[2] not in declared_properties(self.parameters_of(self._name)):
            return None
        self.incoming.position -= len(line) - found.end()
        return found[2]

    def find_only_key(self) -> str | None:
        schema = self.parameters_of(self._name)
        keys = required_properties(schema) or list(declared_properties(schema))
        missing = [key for key in keys if key not in self._given]
        return missing[0] if len(missing) == 1 else None

    def may_follow(self, key: str) -> bool:
        """May this parameter still follow in the call?"""
        declared = declared_properties(self.parameters_of(self._name))
        return key not in self._given and (key in declared or not declared)

    # -- values

    def parse_value(self, writer: JsonWriter, types: frozenset[str]) -> Parsing[None]:
        """Parse a value. One line break at its beginning and one at its end may belong to the tags."""
        incoming = self.incoming
        parts = list[str]()
        is_text = types <= {"string"}
        if self.tags.pads_values and not (yield from incoming.take_if_next("\r\n")):
            yield from incoming.take_if_next("\n")
        if is_text:
            writer.begin_string()
        self._ending = ""

        def say(text: str) -> None:
            if is_text:
                self.write_text(writer, text)
            else:
                parts.append(text)

        yield from self.take_value(say)
        if is_text:
            self.write_text(writer, "", last=True)
            writer.end_string()
        else:
            writer.write_value(to_json_value(re.sub(r"\r?\n\Z", "", "".join(parts)), types))

    def take_value(self, say: Callable[[str], None]) -> Parsing[None]:
        """Take the text of a value, and the line break that may belong to the closing tag."""
        incoming = self.incoming
        at_line = True

        def pass_text(text: str) -> None:
            nonlocal at_line
            last = text.rpartition("\n")[2]
            at_line = not last.strip() and (at_line or len(last) < len(text))
            say(text)

        words = (*self.tags.closers, *self.tags.openers, *self.tags.parameters)
        depth = 0  # calls within the value
        while word := (yield from incoming.take_until(words, pass_text, MIN_CUT_TAG_CHARS)):
            incoming.position -= len(word)
            if not depth and (yield from incoming.run_lookahead(self.ends_value(word, at_line))):
                return
            if word in self.tags.functions:
                depth += yield from incoming.run_lookahead(self.does_call_begin())
            elif word == self.tags.closers[1] and depth:
                depth -= 1
            incoming.position += len(word)
            pass_text(word)

    def ends_value(self, word: str, at_line: bool) -> Parsing[bool]:
        """Does the next tag end the value? word: the tag. at_line: it stands at the beginning of a line."""
        if word in self.tags.closers:
            return (yield from self.do_closers_end_value())
        if word in self.tags.openers:
            if not (yield from self.incoming.run_lookahead(self.does_call_begin())):
                return False
            if self._search_count < MAX_SEARCHES and (yield from self.does_value_continue(nested=True)):
                return False
            self._search_count += 1
            return True
        key = yield from self.take_parameter()
        declared = declared_properties(self.parameters_of(self._name))
        return key is not None and self.may_follow(key) and (at_line or key in declared)

    def do_closers_end_value(self) -> Parsing[bool]:
        """Do the closing tags that come next end the value?"""
        incoming = self.incoming
        closed = yield from self.take_closing_tags()
        if closed.issuperset(self.tags.call_closers):
            if not self.allows_several:  # the answer ends with its only call
                return True
            yield from incoming.take_matching(SPACE)
        if not (yield from incoming.peek()) or (yield from incoming.run_lookahead(self.does_call_begin())):
            return True
        key = yield from incoming.run_lookahead(self.take_parameter())
        if self.is_cut_tag():
            return True
        if closed == {self.tags.closers[0]}:
            return key is not None
        if key is not None and self.may_follow(key):
            return True
        return not (yield from self.does_value_continue(nested=False))

    def does_call_begin(self) -> Parsing[bool]:
        """Does a declared call begin here?"""
        incoming = self.incoming
        name = self._name
        if self.tags.wrapper and (yield from incoming.take_if_next(self.tags.wrapper)):
            yield from incoming.take_matching(SPACE)
        if not (yield from self.take_one_of(self.tags.functions)):
            return False
        try:
            self._name = yield from self.take_function_name()
            yield from incoming.take_matching(SPACE)
            return (yield from self.continues_as_call())
        except BrokenCall:
            return False
        finally:
            self._name = name

    def does_value_continue(self, nested: bool) -> Parsing[bool]:
        """Does a closing tag follow that no call has opened? Then the value continues up to it.

        nested: calls that begin in the text may be part of the value.
        """
        depth = 0
        words = (*self.tags.closers[:2], *self.tags.functions)
        while word := (yield from self.incoming.take_until(words, ignore_text)):
            if word in self.tags.functions:
                self.incoming.position -= len(word)
                opens = yield from self.incoming.run_lookahead(self.does_call_begin())
                self.incoming.position += len(word)
                if opens and not nested:
                    return False
                depth += opens
            elif not depth:
                return True
            elif word == self.tags.closers[1]:
                depth -= 1
        return False

    def write_text(self, writer: JsonWriter, text: str, last: bool = False) -> None:
        """Write text of a value. A line break at its end is held back, since it may belong to the closing tag."""
        text = self._ending + text
        found = re.search(r"\r?\n\Z|\r\Z", text) if self.tags.pads_values else None
        self._ending = "" if found is None else found[0]
        text = text[: len(text) - len(self._ending)]
        if last and self._ending == "\r":
            text += self._ending
        if text:
            writer.write_value(json.dumps(text, ensure_ascii=False)[1:-1])
