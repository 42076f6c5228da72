"""Parses answers in the harmony format of gpt-oss: messages in channels, some of which are calls.

An answer consists of messages: a header, `<|message|>`, a body and an end. The header names the channel and, if the
message goes to a function, that function:

    <|channel|>analysis<|message|>I look first.<|end|><|start|>assistant<|channel|>commentary to=functions.look
    <|constrain|>json<|message|>{"path": "a"}<|call|>

The template has written `<|start|>assistant` before the first message. `analysis` is reasoning, a message to a declared
function is a call, and everything else is text: the channel `final`, and what `commentary` says before a call.
"""

from __future__ import annotations

import re

from attrs import define, field

from adapters.text.answer.answer_pieces import ReasoningPiece
from adapters.text.answer.forms.call_form import CallForm
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing
from adapters.text.answer.json_reader import JsonReader

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CONTROLS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
MAX_HEADER = 512
FUNCTIONS = "functions."
BETWEEN = "\n\n"  # messages that are all text, or all reasoning


@define(eq=False)
class HarmonyCalls(CallForm):
    """Parses whole answers, also where no function may be called."""

    openers = (START, CHANNEL)
    controls = CONTROLS
    closers = ("<|call|>",)
    reads_everything = True
    _thought: bool = field(default=False, init=False)  # reasoning has come
    _said: bool = field(default=False, init=False)  # text has come
    _opens: bool = field(default=False, init=False)  # nothing of the current message's body has come

    def parse_call(self) -> Parsing[None]:
        """Parse nothing: messages are parsed instead."""
        raise BrokenCall
        yield

    def _parse(self) -> Parsing[None]:
        incoming = self.incoming
        while (yield from incoming.peek()):
            header = yield from self.take_header()
            self._opens = True
            if header is None:
                yield from incoming.take_until(CONTROLS, self.say_text)
                continue
            self._is_in_call = True
            yield from self.parse_message(header)
            self._is_in_call = False

    def take_header(self) -> Parsing[str | None]:
        """Take the header of a message. None: text follows that is not part of any message."""
        incoming = self.incoming
        ahead = yield from incoming.peek_many(len(CHANNEL))
        if not ahead.startswith((CHANNEL, START)) and RECIPIENT.match(f"{ahead.lstrip()}x") is None:
            return None
        parts = list[str]()
        size = 0

        def keep(text: str) -> None:
            nonlocal size
            size += len(text)
            parts.append(text)

        word = yield from incoming.take_until((MESSAGE, *ENDS), keep)
        header = "".join(parts)
        if word == MESSAGE and size <= MAX_HEADER:
            return header
        self.say_text(re.sub(r"<\|\w+\|>", "", header) if word or size <= MAX_HEADER else header)
        return "" if word == MESSAGE else None

    def parse_message(self, header: str) -> Parsing[None]:
        """Parse the body of a message and its end."""
        recipient = RECIPIENT.search(header)
        channel = NAMED_CHANNEL.search(header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        if name in self.tools and not self.is_full:
            yield from self.parse_arguments(name)
            return
        if channel is not None and channel[1] == "analysis" and not name:
            self.is_reasoning = True
            yield from self.incoming.take_until((*ENDS, START), self.say_reasoning)
            self.is_reasoning = False
        else:
            if name:  # a call of no declared function stays text
                self.say_text(f"{recipient[0] if recipient else ''} ")
            yield from self.incoming.take_until((*ENDS, START), self.say_text)

    def parse_arguments(self, name: str) -> Parsing[None]:
        """Parse the arguments of a call up to the end of its message. What is no JSON becomes text."""
        incoming = self.incoming
        self.mark_attempt()
        yield from incoming.take_matching(SPACE)
        begun = self.call_count
        if (yield from incoming.peek()) == "{":
            try:
                yield from JsonReader(incoming, self.open_writer(name), self.parameters_of(name)).read_value()
                if self.call_count == begun:
                    self.begin_call(name)
                    self.add_arguments("{}")
            except BrokenCall:
                if incoming.mark is not None:
                    incoming.position = incoming.mark
        self.end_call()
        incoming.mark = None
        yield from incoming.take_until((*ENDS, START), self.say_text)

    def say_text(self, text: str) -> None:
        """Add text. Messages of text are separated from each other."""
        if self._opens and self._said and text.strip() and not self._is_after_call:
            text = BETWEEN + text.lstrip()
        self._said = self._said or bool(text.strip())
        self._opens = self._opens and not text.strip()
        self.add_text(text)

    def say_reasoning(self, text: str) -> None:
        if self._opens and self._thought and text.strip():
            text = BETWEEN + text.lstrip()
        self._thought = self._thought or bool(text.strip())
        self._opens = self._opens and not text.strip()
        if text and not self.is_full:
            self.pieces.append(ReasoningPiece(text))
