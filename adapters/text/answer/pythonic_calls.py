"""Calls as Llama 3.2 and 4 and others write them: `[name(key="value", other=3), another()]`.

Arguments are Python's literals, read here and never evaluated. A call comes as a whole: what a literal is can only be
said at its end.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from adapters.text.answer.call_form import MAX_NAME, CallForm
from adapters.text.answer.incremental_text import MAX_DEPTH, SPACE, BrokenCall, Parsing

WORD = re.compile(r"[A-Za-z0-9_.\-]*")
NUMBER = re.compile(r"[0-9.eE+\-_]*")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "b": "\b", "f": "\f", "0": "\0"}
CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonicCalls(CallForm):
    openers = ("<|python_start|>[", "<|python_tag|>[", "[")
    controls = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
    marks = openers[:2]
    closers = ("]",)

    def opens(self, opener: str, at_line: bool) -> bool:
        return opener != "[" or at_line

    def call(self) -> Parsing[None]:
        incoming, end = self.incoming, ""
        while end != "]":
            yield from incoming.matched(SPACE)
            name = yield from incoming.matched(WORD, MAX_NAME)
            if name not in self.tools or not (yield from incoming.follows("(")):
                raise BrokenCall
            arguments = yield from self.arguments_of_call()
            end = yield from self.one_of("]", ",")
            self.begin(name)
            self.arguments(json.dumps(arguments, ensure_ascii=False))
            self.end()
            self.attempt(end)
            if self.full and end == ",":
                raise BrokenCall
        yield from incoming.matched(SPACE)
        yield from incoming.follows("<|python_end|>")

    def one_of(self, *words: str) -> Parsing[str]:
        """Which of these characters comes next. BrokenCall: none."""
        yield from self.incoming.matched(SPACE)
        char = yield from self.incoming.peek()
        if char not in words:
            raise BrokenCall
        self.incoming.at += 1
        return char

    def arguments_of_call(self) -> Parsing[dict[str, Any]]:
        incoming, found = self.incoming, dict[str, Any]()
        yield from incoming.matched(SPACE)
        if (yield from incoming.follows(")")):
            return found
        while True:
            yield from incoming.matched(SPACE)
            key = yield from incoming.matched(WORD, MAX_NAME)
            if not key or key in found:
                raise BrokenCall
            yield from self.one_of("=")
            found[key] = yield from self.literal(0)
            if (yield from self.one_of(",", ")")) == ")":
                return found

    def literal(self, depth: int) -> Parsing[Any]:
        if depth > MAX_DEPTH:
            raise BrokenCall
        incoming = self.incoming
        yield from incoming.matched(SPACE)
        char = yield from incoming.peek()
        if char in {"'", '"'}:
            incoming.at += 1
            return (yield from self.string(char))
        if char == "[":
            incoming.at += 1
            return (yield from self.listed(depth))
        if char == "{":
            incoming.at += 1
            return (yield from self.mapped(depth))
        if char.isalpha():
            word = yield from incoming.matched(WORD, MAX_NAME)
            if word not in CONSTANTS:
                raise BrokenCall
            return CONSTANTS[word]
        try:
            number = json.loads((yield from incoming.matched(NUMBER, MAX_NAME)))
        except ValueError:
            raise BrokenCall from None
        if not math.isfinite(number):
            raise BrokenCall
        return number

    def listed(self, depth: int) -> Parsing[list[Any]]:
        found: list[Any] = []
        yield from self.incoming.matched(SPACE)
        if (yield from self.incoming.follows("]")):
            return found
        while True:
            found.append((yield from self.literal(depth + 1)))
            if (yield from self.one_of(",", "]")) == "]":
                return found

    def mapped(self, depth: int) -> Parsing[dict[str, Any]]:
        found: dict[str, Any] = {}
        yield from self.incoming.matched(SPACE)
        if (yield from self.incoming.follows("}")):
            return found
        while True:
            key = yield from self.literal(depth + 1)
            if not isinstance(key, str):
                raise BrokenCall
            yield from self.one_of(":")
            found[key] = yield from self.literal(depth + 1)
            if (yield from self.one_of(",", "}")) == "}":
                return found

    def string(self, quote: str) -> Parsing[str]:
        incoming, parts = self.incoming, list[str]()
        ordinary = re.compile(rf"[^{quote}\\]*")
        while True:
            parts.append((yield from incoming.matched(ordinary)))
            char = yield from incoming.peek()
            if not char:
                raise BrokenCall
            incoming.at += 1
            if char == quote:
                return "".join(parts)
            parts.append((yield from self.escaped()))

    def escaped(self) -> Parsing[str]:
        incoming = self.incoming
        char = yield from incoming.peek()
        incoming.at += len(char)
        if char in CODES:
            digits = ""
            for _ in range(CODES[char]):
                digits += yield from incoming.peek()
                incoming.at = min(incoming.at + 1, len(incoming.text))
            try:
                found = chr(int(digits, 16))
                found.encode()
            except (ValueError, OverflowError):
                raise BrokenCall from None
            return found
        return ESCAPES.get(char, "\\" + char)
