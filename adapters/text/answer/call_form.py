"""What all forms of tool calls share: text around them, calls as they begin and end, and what to do with broken ones.

A form is a class that says what opens a call and how one is read. Two rules hold for every form, and this class keeps
them. Only a declared function is called. The arguments of a call are a JSON object, wherever the answer breaks off.

As long as a call has not begun for the client, what turns out to be none is text, word for word. A call begins with
the first part of its arguments that is certain. From then on arguments are passed on as they come, through a
`JsonWriter` that holds back what is not certain and can close the rest at any point. Where they break off, the call
ends and whatever follows is text. So nothing is lost, said twice or withdrawn.

White space beside a call is part of how calls are written, not of the text: the template writes it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attrs import define, field

from adapters.text.answer.answer_pieces import AnswerPiece, ArgumentsPiece, CallBegun, CallEnded, TextPiece
from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.incremental_text import BrokenCall, Incoming, Parsing
from adapters.text.conversation import FunctionTool

MAX_NAME = 128


@define(eq=False)
class CallForm(ABC):
    """The tool calls of one answer.

    tools: what may be called, by name.  new_id: of a call.  parallel: may there be several?
    said: what has come out of it and is not taken yet.  called: whose calls have begun.  ended: how many have ended.
    """

    openers: ClassVar[tuple[str, ...]]
    controls: ClassVar[tuple[str, ...]] = ()  # special tokens that are part of the form
    marks: ClassVar[tuple[str, ...]] = ()  # openers that stand for nothing else, in reasoning too
    closers: ClassVar[tuple[str, ...]] = ()  # a complete call has one of them

    tools: Mapping[str, FunctionTool]
    new_id: Callable[[], str]
    parallel: bool = True
    incoming: Incoming = field(factory=Incoming, init=False)
    said: list[AnswerPiece] = field(factory=list, init=False)
    called: list[str] = field(factory=list, init=False)
    ended: int = field(default=0, init=False)
    writer: JsonWriter | None = field(default=None, init=False)  # of the call that comes
    _opener: str = field(default="", init=False)  # text again, if what it opens is none
    _space: str = field(default="", init=False)  # text if more text follows, and nothing if a call does
    _fresh: bool = field(default=False, init=False)  # nothing was said since a call
    _line: bool = field(default=True, init=False)  # nothing but white space since the last line break
    _calling: bool = field(default=False, init=False)  # what it reads is a call, or what closes one
    _parsing: Parsing[None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._parsing = self._parse()

    @abstractmethod
    def call(self) -> Parsing[None]:
        """Reads what follows an opener. Raises BrokenCall where it is no call, or stops being one."""

    def opens(self, opener: str, at_line: bool) -> bool:  # noqa: ARG002 - most forms open anywhere
        """at_line: does it stand at the beginning of a line?"""
        return True

    @property
    def calls(self) -> int:
        return len(self.called)

    @property
    def full(self) -> bool:
        """The one call that there may be is complete; nothing is said of what follows it."""
        return self.ended > 0 and not self.parallel

    @property
    def closed(self) -> bool:
        """And so is what closes it: from here on nothing has to be read."""
        return self.full and not self._calling

    def push(self, text: str) -> list[AnswerPiece]:
        self.incoming.push(text)
        next(self._parsing, None)
        return self._taken()

    def finish(self) -> list[AnswerPiece]:
        self.incoming.ended = True
        next(self._parsing, None)
        if self._space and not self.full:
            self.said.append(TextPiece(self._space))
        return self._taken()

    def _taken(self) -> list[AnswerPiece]:
        said, self.said = self.said, []
        return said

    def _parse(self) -> Parsing[None]:
        while opener := (yield from self.incoming.until(self.openers, self.text)):
            if not self.opens(opener, self._line):
                self.text(opener)
                continue
            self.attempt(opener)
            self._calling = True
            try:
                yield from self.call()
            except BrokenCall:
                if self.incoming.mark is not None:
                    self.incoming.at = self.incoming.mark
                    if self.calls == self.ended:
                        self.text(self._opener)
            self.end()
            self.incoming.mark, self._calling = None, False

    # -- for forms

    def attempt(self, opener: str = "") -> None:
        """What follows may be a call. If it is broken before it begins, opener and all are text."""
        self.incoming.mark, self._opener = self.incoming.at, opener

    def text(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip()
        if not text or self.full:
            return
        self._fresh = False
        line = text.rpartition("\n")[2]
        self._line = not line.strip() and (self._line or len(line) < len(text))
        if body := text.rstrip():
            self.said.append(TextPiece(self._space + body))
            self._space = ""
        self._space += text[len(body) :]

    def begin(self, name: str) -> None:
        """From now on it is a call. Raises BrokenCall for a name that is not declared."""
        if self.full or name not in self.tools:
            raise BrokenCall
        self.incoming.mark = None
        self.said.append(CallBegun(self.calls, self.new_id(), name))
        self.called.append(name)
        self._space = ""

    def arguments(self, text: str) -> None:
        if text:
            self.said.append(ArgumentsPiece(self.calls - 1, text))

    def stream(self, name: str) -> JsonWriter:
        """The writer of a call's arguments. The call begins with the first text that is certain.

        If the arguments break, whatever was taken since the last certain text comes again.
        """

        def say(text: str) -> None:
            if self.calls == self.ended:
                self.begin(name)
            self.arguments(text)
            self.incoming.mark = self.incoming.at

        self.writer = JsonWriter(say)
        return self.writer

    def schema(self, name: str) -> Mapping[str, Any]:
        return self.tools[name].parameters or {}

    def end(self) -> None:
        """The call that has begun, if one has, is complete, or breaks off here."""
        if self.calls > self.ended:
            if self.writer is not None:
                self.writer.finish()
            self.said.append(CallEnded(self.ended))
            self.ended += 1
            self._fresh = self._line = True
        self.writer = None
