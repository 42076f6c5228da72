"""The tokens that each request of a decode step copies from earlier text.

The launch says how many tokens to copy after a match of each length (`Copying`); the text proposer finds the matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from attrs import frozen

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposer import DecodingSlot, TextProposer
from effects.decode import RunDecode, find_match_class
from effects.ids import Tokens


class CopyingMember(Protocol):
    """A request that decodes: its decode step, and the state of its slot."""

    effect: RunDecode
    state: SlotState


@frozen(eq=False)
class StepCopies:
    """Says what is copied. proposer: None where no text is searched. capacity: rows of a slot."""

    proposer: TextProposer | None
    capacity: int

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        """Return `Decoded.matched` for slots whose states have the tokens of a step already."""
        return [0] * len(slots) if self.proposer is None else self.proposer.find_matches(slots)

    def choose(self, members: Sequence[DecodingSlot]) -> dict[int, Tokens]:
        """Return the tokens that each of these requests copies in the next step, by slot.

        Slots that copy nothing are left out. Copies are shortened to what fits: the rows of the step, the tokens that
        the launch may still give, and the rows of the slot. They end behind a token that ends the answer.
        """
        found: dict[int, Tokens] = {}
        if self.proposer is None:
            return found
        rows = len(members)
        for effect, state in members:
            wanted = self.count(effect, state)
            if not wanted or effect.copying is None:
                continue
            count = min(wanted, effect.copying.rows - rows, effect.steps - 1, self.capacity - state.valid - 1)
            if count > 0 and (tokens := cut_after_stop(self.proposer.copy(effect.slot, count), state.stops)):
                found[effect.slot] = tokens
                rows += len(tokens)
        return found

    def has_match(self, members: Iterable[CopyingMember]) -> bool:
        """Would one of these copy text in its next step?"""
        return self.proposer is not None and any(self.count(member.effect, member.state) for member in members)

    def count(self, effect: RunDecode, state: SlotState) -> int:
        """Return how many tokens a member is to copy in its next step, by the match that its text has now."""
        copying = effect.copying
        if copying is None or self.proposer is None or not copying.steps:
            return 0
        group = find_match_class(self.proposer.read_match(effect.slot, state))
        return copying.counts[group] if group >= 0 else 0


def cut_after_stop(tokens: Tokens, stops: frozenset[int]) -> Tokens:
    """Return the tokens up to the first one that ends the answer."""
    if stops.isdisjoint(tokens):
        return tokens
    return next(tokens[: at + 1] for at, token in enumerate(tokens) if token in stops)
