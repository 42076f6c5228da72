"""Logprobs of the tokens of an answer's text, for APIs in which text is one of several blocks in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from attrs import define, field

from adapters.http.answer.job_stream import PickedToken
from adapters.http.apis.openai_answer import named
from adapters.text.answer.answer_pieces import AnswerPiece, TextPiece
from adapters.text.tokenizer import Tokenizer


@define(eq=False)
class TextLogprobs:
    """Tokens come before or with the pieces of text that they make. begun: something of the open text was given."""

    tokenizer: Tokenizer
    waiting: deque[PickedToken] = field(factory=deque)
    begun: bool = False

    def hear(self, picks: Iterable[PickedToken]) -> None:
        self.waiting.extend(pick for pick in picks if pick.said)

    def take(self, piece: AnswerPiece, *, last: bool) -> list[dict[str, Any]]:
        """Return what is told of the tokens of this piece. last: no text follows it, so all of them are its own."""
        if not isinstance(piece, TextPiece):
            self.begun = False
            return []
        found: list[dict[str, Any]] = []
        left = len(piece.text.encode())
        while self.waiting and (left > 0 or last):
            pick = self.waiting.popleft()
            raw = self.tokenizer.token_bytes(pick.token)
            # white space around reasoning and calls belongs to their tags
            if not self.begun and not raw.strip() and not piece.text[:1].isspace():
                continue
            self.begun = True
            left -= len(raw)
            others = [named(self.tokenizer, *other) for other in pick.logprob[1]]
            found.append({**named(self.tokenizer, pick.token, pick.logprob[0]), "top_logprobs": others})
        return found
