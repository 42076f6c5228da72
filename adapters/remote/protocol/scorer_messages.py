"""What is asked of a drafter in another process, and what it answers."""

from __future__ import annotations

from typing import ClassVar

from adapters.remote.protocol.draft_messages import DraftBytes
from adapters.remote.protocol.messages import Big, Count, Number, Tensors, WireMessage

MOST_SCORINGS = 64  # prompts on their way: who is scored has a slot, and there are no more of these


class LoadDrafter(WireMessage, frozen=True):
    """As it was proven last; its weights are to be fetched. most: tokens of a prompt. limit, shared: as in
    `LoadLayers`.
    """

    most: Count
    fast: bool
    limit: Big
    shared: tuple[Big, Big] = (0, 0)
    slots: ClassVar[int] = 0


class DrafterReady(WireMessage, frozen=True):
    chunk: Count
    memory: DraftBytes
    shared: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """What the next one has to have, too."""
        return (self.chunk,)


class ScorePrompt(WireMessage, frozen=True):
    """As much work as one chunk is through all layers. tensors: the prompt's tokens, with which it begins; else none,
    and it goes on.
    """

    number: Count
    tensors: Tensors


class PromptAdvanced(WireMessage, frozen=True):
    """ns: that it took there. held: bytes that are there of the prompt now. tensors: every token's score, once it is
    through all layers.
    """

    ns: Number
    held: Number
    tensors: Tensors = ()


class DropScoring(WireMessage, frozen=True):
    number: Count
