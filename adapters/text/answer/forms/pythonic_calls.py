"""Parses calls as Llama 3.2, Llama 4 and others write them: `[name(key="value", other=3), another()]`.

Arguments are Python literals. They are parsed here and never evaluated. A call is passed on as a whole, since the value
of a literal is known only at its end.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from adapters.text.answer.forms.call_form import MAX_NAME, CallForm
from adapters.text.answer.incremental_text import MAX_DEPTH, SPACE, BrokenCall, Parsing

WORD = re.compile(r"[A-Za-z0-9_.\-]*")
NUMBER = re.compile(r"[0-9.eE+\-_]*")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "b": "\b", "f": "\f", "0": "\0"}
CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonicCalls(CallForm):
    """Parses a list of calls in Python's notation, with or without control tokens around it."""

    openers = ("<|python_start|>[", "<|python_tag|>[", "[")
    controls = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
    marks = openers[:2]
    closers = ("]",)

    def can_open(self, opener: str, at_line: bool) -> bool:
        return opener != "[" or at_line

    def parse_call(self) -> Parsing[None]:
        incoming = self.incoming
        end = ""
        while end != "]":
            yield from incoming.take_matching(SPACE)
            name = yield from incoming.take_matching(WORD, MAX_NAME)
            if name not in self.tools or not (yield from incoming.take_if_next("(")):
                raise BrokenCall
            arguments = yield from self.parse_arguments()
            end = yield from self.take_one_of("]", ",")
            self.begin_call(name)
            self.add_arguments(json.dumps(arguments, ensure_ascii=False))
            self.end_call()
            self.mark_attempt(end)
            if self.is_full and end == ",":
                raise BrokenCall
        yield from incoming.take_matching(SPACE)
        yield from incoming.take_if_next("<|python_end|>")

    def take_one_of(self, *words: str) -> Parsing[str]:
        """Take the next character, which must be one of these. Raises BrokenCall."""
        yield from self.incoming.take_matching(SPACE)
        char = yield from self.incoming.peek()
        if char not in words:
            raise BrokenCall
        self.incoming.position += 1
        return char

    def parse_arguments(self) -> Parsing[dict[str, Any]]:
        """Parse `key=value` arguments up to the closing parenthesis."""
        incoming = self.incoming
        found = dict[str, Any]()
        yield from incoming.take_matching(SPACE)
        if (yield from incoming.take_if_next(")")):
            return found
        while True:
            yield from incoming.take_matching(SPACE)
            key = yield from incoming.take_matching(WORD, MAX_NAME)
            if not key or key in found:
                raise BrokenCall
            yield from self.take_one_of("=")
            found[key] = yield from self.parse_literal(0)
            if (yield from self.take_one_of(",", ")")) == ")":
                return found

    def parse_literal(self, depth: int) -> Parsing[Any]:
        """Parse a literal. Raises BrokenCall where there is none, or where it is nested too deeply."""
        if depth > MAX_DEPTH:
            raise BrokenCall
        incoming = self.incoming
        yield from incoming.take_matching(SPACE)
        char = yield from incoming.peek()
        if char in {"'", '"'}:
            incoming.position += 1
            return (yield from self.parse_string(char))
        if char == "[":
            incoming.position += 1
            return (yield from self.parse_list(depth))
        if char == "{":
            incoming.position += 1
            return (yield from self.parse_dict(depth))
        if char.isalpha():
            word = yield from incoming.take_matching(WORD, MAX_NAME)
            if word not in CONSTANTS:
                raise BrokenCall
            return CONSTANTS[word]
        try:
            number = json.loads((yield from incoming.take_matching(NUMBER, MAX_NAME)))
        except ValueError:
            raise BrokenCall from None
        if not math.isfinite(number):
            raise BrokenCall
        return number

    def parse_list(self, depth: int) -> Parsing[list[Any]]:
        found: list[Any] = []
        yield from self.incoming.take_matching(SPACE)
        if (yield from self.incoming.take_if_next("]")):
            return found
        while True:
            found.append((yield from self.parse_literal(depth + 1)))
            if (yield from self.take_one_of(",", "]")) == "]":
                return found

    def parse_dict(self, depth: int) -> Parsing[dict[str, Any]]:
        found: dict[str, Any] = {}
        yield from self.incoming.take_matching(SPACE)
        if (yield from self.incoming.take_if_next("}")):
            return found
        while True:
            key = yield from self.parse_literal(depth + 1)
            if not isinstance(key, str):
                raise BrokenCall
            yield from self.take_one_of(":")
            found[key] = yield from self.parse_literal(depth + 1)
            if (yield from self.take_one_of(",", "}")) == "}":
                return found

    def parse_string(self, quote: str) -> Parsing[str]:
        incoming = self.incoming
        parts = list[str]()
        ordinary = re.compile(rf"[^{quote}\\]*")
        while True:
            parts.append((yield from incoming.take_matching(ordinary)))
            char = yield from incoming.peek()
            if not char:
                raise BrokenCall
            incoming.position += 1
            if char == quote:
                return "".join(parts)
            parts.append((yield from self.parse_escape()))

    def parse_escape(self) -> Parsing[str]:
        """Parse an escape of a string, after its backslash."""
        incoming = self.incoming
        char = yield from incoming.peek()
        incoming.position += len(char)
        if char in CODES:
            digits = ""
            for _ in range(CODES[char]):
                digits += yield from incoming.peek()
                incoming.position = min(incoming.position + 1, len(incoming.text))
            try:
                found = chr(int(digits, 16))
                found.encode()
            except (ValueError, OverflowError):
                raise BrokenCall from None
            return found
        return ESCAPES.get(char, "\\" + char)
