"""The tokens that each request of a decode step copies from earlier text.

The launch says how many tokens to copy after a match of each length (`Copying`); the text proposer finds the matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from attrs import evolve, frozen

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import StepMember
from adapters.device.speculation.proposer import CopiedText, DecodingSlot, TextProposer
from effects.decode import Decoded, RunDecode, find_match_class
from effects.ids import DeviceFailed, Tokens


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

    def count_on_branch(self, slot: int) -> int:
        """Return `Decoded.on_branch` of a slot that has copied in the step whose matches were found last."""
        return 0 if self.proposer is None else self.proposer.count_on_branch(slot)

    def choose(self, members: Sequence[DecodingSlot]) -> dict[int, CopiedText]:
        """Return the tokens that each of these requests copies in the next step, by slot.

        Slots that copy nothing are left out. Copies are shortened to what fits: the rows of the step, the tokens that
        the launch may still give, and the rows of the slot. They end behind a token that ends the answer. A branch gets
        the rows that the chain leaves.
        """
        found: dict[int, CopiedText] = {}
        if self.proposer is None:
            return found
        rows = len(members)
        for effect, state in members:
            length, branch = self.count(effect, state)
            if not length or effect.copying is None:
                continue
            left = effect.copying.rows - rows
            length = min(length, left, effect.steps - 1, self.capacity - state.valid - 1)
            if length <= 0:
                continue
            copied = self.proposer.copy(effect.slot, length, min(branch, left - length) if branch else 0)
            if copied.branch or not state.stops.isdisjoint(copied.chain):
                copied = cut_copies(copied, state.stops, min(effect.steps, self.capacity - state.valid) - 1)
            if copied.chain:
                found[effect.slot] = copied
                rows += len(copied.chain) + len(copied.branch)
        return found

    def has_match(self, members: Iterable[CopyingMember]) -> bool:
        """Would one of these copy text in its next step?"""
        if self.proposer is None:
            return False
        return any(self.count(member.effect, member.state) > (0, 0) for member in members)

    def describe(
        self, found: Sequence[Decoded | DeviceFailed], members: Sequence[StepMember], copies: Mapping[int, CopiedText]
    ) -> Sequence[Decoded | DeviceFailed]:
        """Return the outcomes of a step's members with what they say of copies, once `find_matches` was called.

        copies: what `choose` has returned. A grammar may have cut it since.
        """
        if not copies:
            return found
        rows = sum(1 + member.tree.size for member in members)
        branched = any(member.tree.has_branches for member in members if member.slot in copies)
        chains = [member.tree.chain_length if member.slot in copies else 0 for member in members]
        return [
            evolve(
                outcome,
                copied=chain,
                rows=rows,
                branched=branched,
                on_branch=self.count_on_branch(member.slot) if chain else 0,
            )
            if isinstance(outcome, Decoded)
            else outcome
            for outcome, member, chain in zip(found, members, chains, strict=True)
        ]

    def count(self, effect: RunDecode, state: SlotState) -> tuple[int, int]:
        """Return how many tokens a member is to copy in its next step, by the match that its text has now.

        The first number is that of the chain, the second one that of its branch.
        """
        copying = effect.copying
        if copying is None or self.proposer is None or not copying.steps:
            return 0, 0
        group = find_match_class(self.proposer.read_match(effect.slot, state))
        return (copying.counts[group], copying.branches[group]) if group >= 0 else (0, 0)


def cut_copies(copied: CopiedText, stops: frozenset[int], depth: int) -> CopiedText:
    """Return copies that end with the answer. depth: the tokens that may follow each other."""
    tokens = cut_after_stop(copied.chain, stops)
    if copied.fork >= len(tokens):
        return CopiedText(tokens)
    return CopiedText(tokens, copied.fork, cut_after_stop(copied.branch, stops)[: depth - copied.fork])


def cut_after_stop(tokens: Tokens, stops: frozenset[int]) -> Tokens:
    """Return the tokens up to the first one that ends the answer."""
    if stops.isdisjoint(tokens):
        return tokens
    return next(tokens[: at + 1] for at, token in enumerate(tokens) if token in stops)
