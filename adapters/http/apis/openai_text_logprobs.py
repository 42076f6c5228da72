"""Assign logprobs to the tokens of an answer's text, for APIs in which text is one of several blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from attrs import define, field

from adapters.http.answer.job_stream import PickedToken
from adapters.http.apis.openai_answer import make_token_logprob
from adapters.text.answer.answer_pieces import AnswerPiece, TextPiece
from adapters.text.tokenizer import Tokenizer


@define(eq=False)
class TextLogprobs:
    """Matches tokens with pieces of text. Tokens come before or with the pieces that they make.

    has_begun: some of the open text was already matched.
    """

    tokenizer: Tokenizer
    pending: deque[PickedToken] = field(factory=deque)
    has_begun: bool = False

    def add(self, picks: Iterable[PickedToken]) -> None:
        self.pending.extend(pick for pick in picks if pick.is_text)

    def take_for_piece(self, piece: AnswerPiece, *, last: bool) -> list[dict[str, Any]]:
        """Return the logprobs of the tokens of this piece. last: no text follows it, so all remaining tokens belong to
        it.
        """
        if not isinstance(piece, TextPiece):
            self.has_begun = False
            return []
        found: list[dict[str, Any]] = []
        left = len(piece.text.encode())
        while self.pending and (left > 0 or last):
            pick = self.pending.popleft()
            raw = self.tokenizer.token_bytes(pick.token)
            # White space around reasoning and calls belongs to their tags.
            if not self.has_begun and not raw.strip() and not piece.text[:1].isspace():
                continue
            self.has_begun = True
            left -= len(raw)
            others = [make_token_logprob(self.tokenizer, *other) for other in pick.logprob[1]]
            found.append({**make_token_logprob(self.tokenizer, pick.token, pick.logprob[0]), "top_logprobs": others})
        return found
