"""Separates the reasoning at the beginning of an answer from the rest."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen

from adapters.text.answer.answer_pieces import AnswerPiece, ReasoningPiece, TextPiece
from adapters.text.answer.forms.call_form import CallForm
from adapters.text.answer.incremental_text import SPACE, BrokenCall, IncomingText, Parsing

MAX_SEARCHES = 16  # of all text, for a call inside the reasoning


@frozen
class ReasoningTags:
    """The tags around reasoning. label: the word that follows the opening tag, if any does."""

    opening: str
    closing: str
    label: str = ""


@define(eq=False)
class ReasoningParser:
    """Parses reasoning at the beginning of an answer. White space inside and after the tags belongs to the tags.

    Some models call a function in their reasoning and end there. So a call inside reasoning is held back. If the
    reasoning ends later, the call was a part of it. If it never ends, a complete call is a call.

    starts_open: the template has already opened the reasoning.
    pass_on: takes all text that is not reasoning.
    new_form: makes a parser of calls. None: there are no calls.
    unclosed: the text that `pass_on` took at the end was inside reasoning that never ended.
    """

    tags: ReasoningTags
    starts_open: bool
    pass_on: Callable[[str], None]
    new_form: Callable[[], CallForm] | None = None
    unclosed: bool = field(default=False, init=False)
    pieces: list[AnswerPiece] = field(factory=list, init=False)
    is_active: bool = field(init=False)
    _search_count: int = field(default=0, init=False)  # how often all text was searched for a call
    _space: str = field(default="", init=False)
    _incoming: IncomingText = field(factory=IncomingText, init=False)
    _parsing: Parsing[None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.is_active = self.starts_open
        self._parsing = self._parse()

    def push(self, text: str) -> list[AnswerPiece]:
        self._incoming.push(text)
        next(self._parsing, None)
        return self._take_pieces()

    def finish(self) -> list[AnswerPiece]:
        self._incoming.ended = True
        next(self._parsing, None)
        return self._take_pieces()

    def _take_pieces(self) -> list[AnswerPiece]:
        said = self.pieces
        self.pieces = []
        return said

    def _parse(self) -> Parsing[None]:
        incoming = self._incoming
        space = yield from incoming.take_matching(SPACE)
        again = yield from incoming.take_if_next(
            self.tags.opening
        )  # some models open it although the template already has
        if again or self.starts_open:
            self.is_active = True
            yield from incoming.take_matching(SPACE)
            if again and self.tags.label and (yield from incoming.take_if_next(self.tags.label)):
                yield from incoming.take_matching(SPACE)
            yield from self._parse_reasoning()
            self.is_active = False
            if self.unclosed:
                return
            yield from incoming.take_matching(SPACE)
        elif space:
            self.pass_on(space)
        while True:
            if rest := incoming.rest:
                incoming.position = len(incoming.text)
                self.pass_on(rest)
            if not (yield from incoming.wait_for_more()):
                return

    def _parse_reasoning(self) -> Parsing[None]:
        """Parse up to the closing tag, or up to the end of all text."""
        incoming = self._incoming
        form = self.new_form() if self.new_form is not None else None
        marks = form.marks if form is not None else ()
        while word := (yield from incoming.take_until((self.tags.closing, *marks), self._add_reasoning)):
            if word == self.tags.closing:
                return
            if self._search_count >= MAX_SEARCHES:
                self._add_reasoning(word)
                continue
            incoming.position -= len(word)
            if (yield from incoming.run_lookahead(self._ends_in_call())):
                self.unclosed = True
                self.pass_on(incoming.rest)
                return
            incoming.position += len(word)
            self._add_reasoning(word)

    def _ends_in_call(self) -> Parsing[bool]:
        """Does a complete call follow, and then the end of all text, without the end of the reasoning?"""
        assert self.new_form is not None
        form = self.new_form()
        written = list[str]()
        said = list[AnswerPiece]()

        def take(text: str) -> None:
            written.append(text)
            said.extend(form.push(text))
            if said and isinstance(said[0], TextPiece):
                raise BrokenCall

        try:
            closed = yield from self._incoming.take_until((self.tags.closing,), take)
        except BrokenCall:
            return False
        if closed:
            self._search_count = MAX_SEARCHES  # the reasoning ends, so no call in it counts
            return False
        complete = any(closer in "".join(written) for closer in form.closers)
        self._search_count += 1 if complete else MAX_SEARCHES  # then no later call is complete either
        return complete and form.call_count > 0

    def _add_reasoning(self, text: str) -> None:
        if body := text.rstrip():
            self.pieces.append(ReasoningPiece(self._space + body))
            self._space = ""
        self._space += text[len(body) :]
