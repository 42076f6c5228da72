"""What a model thinks, told from what it says."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen

from adapters.text.answer.answer_pieces import AnswerPiece, ReasoningPiece, TextPiece
from adapters.text.answer.call_form import CallForm
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Incoming, Parsing

MOST_LOOKS = 16  # through all text, for a call in it


@frozen
class ReasoningTags:
    opening: str
    closing: str


@define(eq=False)
class Thinking:
    """Reasoning at the beginning of an answer; white space inside its tags and behind them belongs to them.

    Some models call a function in their reasoning and end there. So a call in it is held back until it is known: where
    the reasoning ends later, the call was a part of it; where it never ends, a complete call is one.

    opened: by the template already.  say: takes all that is no reasoning.  form: a new reader of calls; None: there are
    none.  unclosed: what `say` took at the end stood in reasoning that never ended.
    """

    tags: ReasoningTags
    opened: bool
    say: Callable[[str], None]
    form: Callable[[], CallForm] | None = None
    unclosed: bool = field(default=False, init=False)
    said: list[AnswerPiece] = field(factory=list, init=False)
    active: bool = field(init=False)
    _looked: int = field(default=0, init=False)  # how often all text was looked through
    _space: str = field(default="", init=False)
    _incoming: Incoming = field(factory=Incoming, init=False)
    _parsing: Parsing[None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.active = self.opened
        self._parsing = self._parse()

    def push(self, text: str) -> list[AnswerPiece]:
        self._incoming.push(text)
        next(self._parsing, None)
        return self._taken()

    def finish(self) -> list[AnswerPiece]:
        self._incoming.ended = True
        next(self._parsing, None)
        return self._taken()

    def _taken(self) -> list[AnswerPiece]:
        said, self.said = self.said, []
        return said

    def _parse(self) -> Parsing[None]:
        incoming = self._incoming
        space = yield from incoming.matched(SPACE)
        again = yield from incoming.follows(self.tags.opening)  # some models open it although the template has
        if again or self.opened:
            self.active = True
            yield from incoming.matched(SPACE)
            yield from self._thoughts()
            self.active = False
            if self.unclosed:
                return
            yield from incoming.matched(SPACE)
        elif space:
            self.say(space)
        while True:
            if rest := incoming.rest:
                incoming.at = len(incoming.text)
                self.say(rest)
            if not (yield from incoming.more()):
                return

    def _thoughts(self) -> Parsing[None]:
        """Up to the closing tag, or the end of all text."""
        incoming, form = self._incoming, self.form() if self.form is not None else None
        marks = form.marks if form is not None else ()
        while word := (yield from incoming.until((self.tags.closing, *marks), self._think)):
            if word == self.tags.closing:
                return
            if self._looked >= MOST_LOOKS:
                self._think(word)
                continue
            incoming.at -= len(word)
            if (yield from incoming.look(self._calls())):
                self.unclosed = True
                self.say(incoming.rest)
                return
            incoming.at += len(word)
            self._think(word)

    def _calls(self) -> Parsing[bool]:
        """Do a complete call and the end of all text follow, without the end of the reasoning?"""
        assert self.form is not None
        form, written, said = self.form(), list[str](), list[AnswerPiece]()

        def take(text: str) -> None:
            written.append(text)
            said.extend(form.push(text))
            if said and isinstance(said[0], TextPiece):
                raise BrokenCall

        try:
            closed = yield from self._incoming.until((self.tags.closing,), take)
        except BrokenCall:
            return False
        if closed:
            self._looked = MOST_LOOKS  # the reasoning ends, whatever else stands in it
            return False
        complete = any(closer in "".join(written) for closer in form.closers)
        self._looked += 1 if complete else MOST_LOOKS  # no call that begins later is complete, either
        return complete and form.calls > 0

    def _think(self, text: str) -> None:
        if body := text.rstrip():
            self.said.append(ReasoningPiece(self._space + body))
            self._space = ""
        self._space += text[len(body) :]
