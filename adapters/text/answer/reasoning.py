"""What a model thinks, told from what it says."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen

from adapters.text.answer.incoming import SPACE, Incoming, Parsing
from adapters.text.answer.pieces import AnswerPiece, ReasoningPiece


@frozen
class ReasoningTags:
    opening: str
    closing: str


@define(eq=False)
class Thinking:
    """Reasoning at the beginning of an answer; white space inside its tags and behind them belongs to them.

    opened: by the template already.  say: takes all that is no reasoning.
    """

    tags: ReasoningTags
    opened: bool
    say: Callable[[str], None]
    said: list[AnswerPiece] = field(factory=list, init=False)
    active: bool = field(init=False)
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
            closed = yield from incoming.until((self.tags.closing,), self._think)
            self.active = False
            if closed:
                yield from incoming.matched(SPACE)
        elif space:
            self.say(space)
        while True:
            if rest := incoming.rest:
                incoming.at = len(incoming.text)
                self.say(rest)
            if not (yield from incoming.more()):
                return

    def _think(self, text: str) -> None:
        if body := text.rstrip():
            self.said.append(ReasoningPiece(self._space + body))
            self._space = ""
        self._space += text[len(body) :]
