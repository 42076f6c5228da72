"""The rules of attention: which keys a row sees, and how its scores become weights."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen
class AttentionMask:
    """The keys of its block, `[first, stop)`, that a row sees.

    causal: none behind itself; otherwise the block to its end. window: of the keys up to and including itself only
    the last `window`; 0: all.
    """

    causal: bool = False
    window: int = 0

    def lowest(self, first: int, position: int) -> int:
        """Return the first key that the row at `position` sees."""
        return max(first, position - self.window + 1) if self.window else first


@frozen(eq=False)
class AttentionRule:
    """The rule of one layer's causal attention.

    window: of the keys up to and including its own, a row sees only the last `window`; 0: all. Keys before that are not
    read, apart from those in the same tile as the first one. cap: a score s becomes `cap * tanh(s / cap)`; 0: it stays
    as it is. sinks: float32 `[H]`, a score of each query head that joins the sum of the softmax and has no value; None:
    there are none. latent: keys and values are one tensor, and a value is the last `latent` numbers of a key; 0: values
    have rows of their own.
    """

    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None
    latent: int = 0


PLAIN = AttentionRule()
