"""The messages for a prompt scorer in another process. Options and reasons in JSON call it "drafter"."""

from __future__ import annotations

from typing import ClassVar

from adapters.remote.protocol.draft_messages import DraftBytes
from adapters.remote.protocol.messages import Big, Count, Number, Tensors, WireMessage

MOST_SCORINGS = 64  # prompts that are scored at once: each holds a slot of the target, and there are no more slots


class LoadScorer(WireMessage, frozen=True):
    """The request to load a scorer, with the numerics that were proven last. `FETCH_DRAFT` brings its weights.

    most: tokens of a prompt. limit, shared: as in `LoadLayers`.
    """

    most: Count
    fast: bool
    limit: Big
    shared: tuple[Big, Big] = (0, 0)
    slots: ClassVar[int] = 0


class ScorerReady(WireMessage, frozen=True):
    """A loaded scorer. chunk: rows of a chunk."""

    chunk: Count
    memory: DraftBytes
    shared: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """The facts that must be the same after the process was started again."""
        return (self.chunk,)


class ScorePrompt(WireMessage, frozen=True):
    """The request to score a prompt further, by as much work as one chunk through all layers.

    tensors: the tokens in the first request for a prompt; empty in the following ones.
    """

    number: Count
    tensors: Tensors


class PromptAdvanced(WireMessage, frozen=True):
    """The progress of a prompt.

    ns: time that the daemon spent. held: bytes that the daemon holds for the prompt. tensors: the score of every token
    once all layers are done; empty before.
    """

    ns: Number
    held: Number
    tensors: Tensors = ()


class DropScoring(WireMessage, frozen=True):
    """The request to forget a prompt that is being scored."""

    number: Count
