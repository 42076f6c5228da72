"""The base class of all forms of tool calls: text around calls, their beginning and end, and broken calls.

A form is a subclass that says what opens a call and how it is parsed. Two invariants hold for every form:

1. Only a declared function is called.
2. The arguments of a call are a JSON object, even if the answer breaks off anywhere.

What looks like a call may turn out to be none. Until the call has begun for the client, it becomes text, word for word.
A call begins with the first part of its arguments that is certain. From then on arguments are passed on as they come.
A `JsonWriter` holds back what is not certain and can close the rest at any point. Where the arguments break off, the
call ends, and all that follows is text. So no text is lost, repeated or withdrawn.

White space around a call belongs to the call and not to the text: the template writes it again.

Example: the answer `Let me look. <tool_call>{"name": "read", "arguments": {"path": "a` breaks off here. The client got
the text "Let me look.", the beginning of a call of `read`, and `{"path": "a`. Then the writer closes the rest, so the
arguments end as `{"path": "a"}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attrs import define, field

from adapters.text.answer.answer_pieces import AnswerPiece, ArgumentsPiece, CallBegun, CallEnded, TextPiece
from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.incremental_text import BrokenCall, IncomingText, Parsing
from adapters.text.conversation import FunctionTool

MAX_NAME = 128


@define(eq=False)
class CallForm(ABC):
    """Parses the tool calls of one answer.

    tools: the functions that may be called, by name.
    new_id: makes the id of a call.
    allows_several: the answer may have several calls.
    pieces: the output that was not taken yet.
    called_names: the functions whose calls have begun.
    ended_count: number of calls that have ended.
    """

    openers: ClassVar[tuple[str, ...]]
    controls: ClassVar[tuple[str, ...]] = ()  # special tokens that are part of the form
    marks: ClassVar[tuple[str, ...]] = ()  # openers that always mean a call, in reasoning as well
    closers: ClassVar[tuple[str, ...]] = ()  # a complete call has one of them
    reads_everything: ClassVar[bool] = False  # answers have this form even if there are no functions

    tools: Mapping[str, FunctionTool]
    new_id: Callable[[], str]
    allows_several: bool = True
    incoming: IncomingText = field(factory=IncomingText, init=False)
    pieces: list[AnswerPiece] = field(factory=list, init=False)
    called_names: list[str] = field(factory=list, init=False)
    is_reasoning: bool = field(default=False, init=False)  # the form itself separates reasoning, and is inside it
    ended_count: int = field(default=0, init=False)
    writer: JsonWriter | None = field(default=None, init=False)  # writes the arguments of the current call
    _opener: str = field(default="", init=False)  # becomes text if no call follows it
    _space: str = field(default="", init=False)  # becomes text if more text follows, and nothing if a call follows
    _is_after_call: bool = field(default=False, init=False)  # no text has come since a call
    _is_line_start: bool = field(default=True, init=False)  # only white space since the last line break
    _is_in_call: bool = field(default=False, init=False)  # the current text is a call, or closes one
    _parsing: Parsing[None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._parsing = self._parse()

    @abstractmethod
    def parse_call(self) -> Parsing[None]:
        """Parse what follows an opener. Raises BrokenCall where it is no call, or stops being one."""

    def can_open(self, opener: str, at_line: bool) -> bool:  # noqa: ARG002 - most forms open anywhere
        """Can this opener begin a call here? at_line: it stands at the beginning of a line."""
        return True

    @property
    def call_count(self) -> int:
        return len(self.called_names)

    @property
    def is_full(self) -> bool:
        """Is the only allowed call complete? All text after it is dropped."""
        return self.ended_count > 0 and not self.allows_several

    @property
    def is_closed(self) -> bool:
        """Is the only allowed call closed as well? No more text has to be read."""
        return self.is_full and not self._is_in_call

    def push(self, text: str) -> list[AnswerPiece]:
        self.incoming.push(text)
        next(self._parsing, None)
        return self._take_pieces()

    def finish(self) -> list[AnswerPiece]:
        self.incoming.ended = True
        next(self._parsing, None)
        if self._space and not self.is_full:
            self.pieces.append(TextPiece(self._space))
        return self._take_pieces()

    def _take_pieces(self) -> list[AnswerPiece]:
        said = self.pieces
        self.pieces = []
        return said

    def _parse(self) -> Parsing[None]:
        """Parse the whole answer: text, and a call after each opener."""
        while opener := (yield from self.incoming.take_until(self.openers, self.add_text)):
            if not self.can_open(opener, self._is_line_start):
                self.add_text(opener)
                continue
            self.mark_attempt(opener)
            self._is_in_call = True
            try:
                yield from self.parse_call()
            except BrokenCall:
                if self.incoming.mark is not None:
                    self.incoming.position = self.incoming.mark
                    if self.call_count == self.ended_count:
                        self.add_text(self._opener)
            self.end_call()
            self.incoming.mark = None
            self._is_in_call = False

    # -- used by the forms

    def mark_attempt(self, opener: str = "") -> None:
        """Mark the position at which a call may begin. If it breaks before it has begun, all from here is text."""
        self.incoming.mark = self.incoming.position
        self._opener = opener

    def add_text(self, text: str) -> None:
        """Add text of the answer. White space is held back, since it may belong to a call."""
        if self._is_after_call:
            text = text.lstrip()
        if not text or self.is_full:
            return
        self._is_after_call = False
        line = text.rpartition("\n")[2]
        self._is_line_start = not line.strip() and (self._is_line_start or len(line) < len(text))
        if body := text.rstrip():
            self.pieces.append(TextPiece(self._space + body))
            self._space = ""
        self._space += text[len(body) :]

    def begin_call(self, name: str) -> None:
        """Begin a call for the client. Raises BrokenCall for a name that is not declared."""
        if self.is_full or name not in self.tools:
            raise BrokenCall
        self.incoming.mark = None
        self.pieces.append(CallBegun(self.call_count, self.new_id(), name))
        self.called_names.append(name)
        self._space = ""

    def add_arguments(self, text: str) -> None:
        if text:
            self.pieces.append(ArgumentsPiece(self.call_count - 1, text))

    def open_writer(self, name: str) -> JsonWriter:
        """Return a writer for the arguments of a call. The call begins with the first text that is certain.

        If the arguments break, parsing continues after the last certain text.
        """

        def say(text: str) -> None:
            if self.call_count == self.ended_count:
                self.begin_call(name)
            self.add_arguments(text)
            self.incoming.mark = self.incoming.position

        self.writer = JsonWriter(say)
        return self.writer

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        return self.tools[name].parameters or {}

    def end_call(self) -> None:
        """End the call that has begun, if there is one: it is complete, or it breaks off here."""
        if self.call_count > self.ended_count:
            if self.writer is not None:
                self.writer.finish()
            self.pieces.append(CallEnded(self.ended_count))
            self.ended_count += 1
            self._is_after_call = self._is_line_start = True
        self.writer = None
