"""An answer that a model is made to give, so that proposals can be measured on texts that it did not write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, field

from adapters.device.sampling.grammar_mask import Mask, Matching
from effects.grammar import Grammar
from effects.ids import Tokens


@define(eq=False)
class ForcedAnswer:
    """Implements `Matching`: the answer is this text, whatever the model finds likely. vocab: of the model."""

    tokens: Tokens
    vocab: int
    _said: int = field(init=False, default=0)

    def mask(self, path: Tokens) -> Mask | str:
        """Allow the next token. Behind a wrong proposal, whose row is rolled back, allow any token."""
        at = self._said + len(path)
        bits = np.zeros(-(-self.vocab // 8), np.uint8)
        if path == self.tokens[self._said : at] and at < len(self.tokens):
            bits[self.tokens[at] // 8] = 1 << self.tokens[at] % 8
        else:
            bits.fill(255)
        return bits

    def count_allowed(self, path: Tokens) -> int:
        """Return the length of the path: it forbids nothing, so wrong proposals are verified like any others."""
        return len(path)

    def append(self, tokens: Sequence[int]) -> None:
        self._said += len(tokens)


def force_answers(answers: Mapping[str, Tokens], vocab: int) -> Callable[[Grammar], Matching]:
    """Return what makes the matching of a grammar, and takes its source as the name of an answer."""
    return lambda grammar: ForcedAnswer(answers[grammar.source], vocab)
