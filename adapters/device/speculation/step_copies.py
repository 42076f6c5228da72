"""The tokens that each request of a decode step copies from earlier text.

The launch says how many tokens to copy after a match of each length (`Copying`); the text proposer finds the matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import NOT_COPIED, CopyCounts, StepMember
from adapters.device.speculation.proposer import NO_COPIES, CopiedTexts, DecodingSlot, TextProposer
from adapters.models.kernels.interfaces.text_matching import Branch
from effects.decode import RunDecode, choose_search_gap, find_match_class, share_rows
from effects.ids import SlotId, Tokens

MOST_STEPS = 1 << 62  # no step has this number
MOST_ROWS = 1 << 30  # no step has as many rows


class CopyingMember(Protocol):
    """A request that decodes: its decode step, and the state of its slot."""

    @property
    def effect(self) -> RunDecode: ...

    @property
    def state(self) -> SlotState: ...

    @property
    def is_last_step(self) -> bool:
        """Does the launch end for the request with this step? Then the core may give it another rule for copies."""
        ...


@define(eq=False)
class TextSearch:
    """The searches of one text. state: of the slot, as long as the same request has it.

    since: its tokens when it was first seen, or at the first of the searches in a row that found nothing; -1: the last
    search found something. due: the number of the step after which it is searched next; 0: after each step.
    """

    state: SlotState
    since: int
    due: int


@define(eq=False)
class StepCopies:
    """Says what is copied. proposer: None where no text is searched. capacity: rows of a slot."""

    proposer: TextProposer | None
    capacity: int
    # Slots in which the last search found a match. Mostly there are none, and then no request is looked up.
    _matching: set[int] = field(init=False, factory=set[int])
    # Slots of which any search has found something for the same request: such a text asks before its launch ends.
    _matched_before: set[int] = field(init=False, factory=set[int])
    _searches: dict[int, TextSearch] = field(init=False, factory=dict[int, TextSearch])  # by slot
    _states: list[SlotState] = field(init=False, factory=list[SlotState])  # of the last step
    _steps: int = field(init=False, default=0)  # of all launches
    _next_search: int = field(init=False, default=0)  # number of the step after which a text of `_states` may be due

    def index_texts(self, members: Sequence[CopyingMember]) -> None:
        """Index the texts of members that have a rule for copies. Called while the device is at their first step.

        A prompt of 32,000 tokens takes 1 ms, which its first token would wait for otherwise.
        """
        if self.proposer is not None and members:
            asking = [member for member in members if member.effect.copying is not None]
            self.proposer.index_texts([(member.effect.slot, member.state) for member in asking])

    def find_matches(self, members: Sequence[CopyingMember]) -> Sequence[int]:
        """Return `Decoded.matched` for members whose states have the tokens of a step already.

        A text is searched if the member has a rule for copies. It is also searched in the member's last step before the
        core may give it one, if there was a match before. Texts that have had no match for long are searched after some
        steps only, all after the same ones (`choose_search_gap`). Between two searches they match nothing.

        Most steps have the requests of the step before and nothing to search. They end here before anything is done
        for single requests, because code and texts have left the processor's caches since the step before.
        """
        if self.proposer is None:
            return [0] * len(members)
        self._steps += 1
        states = [member.state for member in members]
        if states != self._states:
            self._note_members(members, states)
        if self._steps < self._next_search:
            return [0] * len(members)
        matched_before = self._matched_before
        asking = [
            member
            for member in members
            if member.effect.copying is not None or (member.effect.slot in matched_before and member.is_last_step)
        ]
        if asking:
            return self._search(members, asking)
        if self._matching:
            self._matching.difference_update([member.effect.slot for member in members])
        return [0] * len(members)

    def _note_members(self, members: Sequence[CopyingMember], states: list[SlotState]) -> None:
        """Note that the step has other requests than the one before. If some have only ended, nothing is due sooner."""
        assert self.proposer is not None
        slots = [(member.effect.slot, member.state) for member in members]
        if not set(self._states).issuperset(states):
            self._next_search = 0
            for slot, state in slots:
                known = self._searches.get(slot)
                if known is not None and known.state is not state:
                    self._matched_before.discard(slot)  # another request
        self._states = states
        self.proposer.note_tokens(slots)

    def _search(self, members: Sequence[CopyingMember], asking: Sequence[CopyingMember]) -> Sequence[int]:
        """Search the texts that are due, and note which have a match and when the others are searched again."""
        assert self.proposer is not None
        step = self._steps
        count = len(members)
        due = list[tuple[SlotId, SlotState]]()
        searches = list[TextSearch]()  # of those that are due
        next_search = MOST_STEPS
        for member in asking:
            slot = member.effect.slot
            state = member.state
            known = self._searches.get(slot)
            if known is None or known.state is not state:
                known = self._searches[slot] = TextSearch(state, len(state.tokens), step)
            if known.due <= step:
                due.append((slot, state))
                searches.append(known)
            elif known.due < next_search:
                next_search = known.due
        matches = dict.fromkeys([member.effect.slot for member in members], 0)
        found = self.proposer.find_matches(due) if due else ()
        due_steps = dict[tuple[int, bool], int]()  # by the tokens without a match: many texts have the same number
        for (slot, state), known, matched in zip(due, searches, found, strict=True):
            if matched:
                matches[slot] = matched
                self._matching.add(slot)
                if known.since >= 0:
                    self._matched_before.add(slot)
                    known.since = -1
                    known.due = 0
                next_search = step + 1
                continue
            self._matching.discard(slot)
            tokens = len(state.tokens)
            if known.since < 0:
                known.since = tokens
            key = tokens - known.since, slot in self._matched_before
            following = due_steps.get(key)
            if following is None:
                following = due_steps[key] = find_next_step(step, key[0], count, has_matched=key[1])
                next_search = min(next_search, following)
            known.due = following
        # The launch of another member may end at any step. If its text has matched, it asks then.
        may_ask = len(asking) < count and self._matched_before
        self._next_search = step + 1 if may_ask else next_search
        return list(matches.values())

    def count_on_branch(self, slot: int) -> int:
        """Return `Decoded.on_branch` of a slot that has copied in the step whose matches were found last."""
        return 0 if self.proposer is None else self.proposer.count_on_branch(slot)

    def choose(self, members: Sequence[DecodingSlot]) -> CopiedTexts:
        """Return the tokens that each of these requests copies in the next step.

        Slots that copy nothing are left out. Copies are shortened to what fits: the request's share of the rows of the
        step (`share_rows`), the tokens that the launch may still give, and the rows of the slot. They end behind a
        token that ends the answer. A branch gets the rows that the chain leaves of the share.
        """
        proposer = self.proposer
        if proposer is None or not self._matching:
            return NO_COPIES
        asking = list[tuple[DecodingSlot, int, int]]()  # with the tokens of a chain, and those of its branch
        wanted = list[int]()
        row_limit = MOST_ROWS
        for member in members:
            effect, state = member
            copying = effect.copying
            group = self.find_class(effect, state)
            if group < 0 or copying is None:
                continue
            length = min(copying.counts[group], self._count_room(member))
            if length <= 0:
                continue
            asking.append((member, length, copying.branches[group]))
            wanted.append(length + copying.branches[group])
            row_limit = min(row_limit, copying.rows)
        chains: dict[int, Tokens] = {}
        branches: dict[int, Branch] = {}
        for (member, wanted_length, branch_length), share in zip(
            asking, share_rows(wanted, row_limit - len(members)), strict=True
        ):
            effect, state = member
            slot = effect.slot
            length = min(share, wanted_length)
            if not length:
                continue
            copied = proposer.copy(slot, length)
            chain = cut_after_stop(copied, state.stops)
            if not chain:
                continue
            chains[slot] = chain
            if branch_length:
                fork, tokens = proposer.find_branch(slot, len(copied), min(branch_length, share - length))
                depth = self._count_room(member)
                branch = cut_after_stop(tokens, state.stops)[: depth - fork]
                if branch and fork < len(chain):
                    branches[slot] = Branch(fork, branch)
        return CopiedTexts(chains, branches)

    def _count_room(self, member: DecodingSlot) -> int:
        """Return how many tokens a member may copy: the launch and the slot must have room for one more."""
        return min(member.effect.steps, self.capacity - member.state.valid) - 1

    @property
    def has_matching_text(self) -> bool:
        """Has the last search of any text found something? If not, no request copies anything in its next step."""
        return bool(self._matching)

    def has_match(self, members: Iterable[CopyingMember]) -> bool:
        """Would one of these copy text in its next step?"""
        return bool(self._matching) and any(self.find_class(member.effect, member.state) >= 0 for member in members)

    def count_copies(self, members: Sequence[StepMember], copies: CopiedTexts) -> Sequence[CopyCounts]:
        """Return what the outcome of each member says of copies, once `find_matches` was called for the step.

        copies: what `choose` has returned. A grammar may have cut it since.
        """
        if not copies.chains:
            return [NOT_COPIED] * len(members)
        rows = sum(len(member.tree.tokens) for member in members)
        branched = any(member.tree.has_branches for member in members if member.slot in copies.branches)
        found = list[CopyCounts]()
        for member in members:
            chain = 0
            if member.slot in copies.chains:
                chain = member.tree.chain_length if member.slot in copies.branches else member.tree.size
            found.append(CopyCounts(rows, branched, chain, self.count_on_branch(member.slot) if chain else 0))
        return found

    def find_class(self, effect: RunDecode, state: SlotState) -> int:
        """Return the class of the match after which a member copies in its next step; -1 if it copies nothing."""
        copying = effect.copying
        if copying is None or self.proposer is None or not copying.steps or effect.slot not in self._matching:
            return -1
        group = find_match_class(self.proposer.read_match(effect.slot, state))
        return group if group >= 0 and copying.counts[group] else -1


def find_next_step(step: int, unmatched: int, members: int, *, has_matched: bool) -> int:
    """Return the number of the step behind this one after which a text is searched again. Arguments: as in
    `choose_search_gap`.
    """
    gap = choose_search_gap(unmatched, members, has_matched=has_matched)
    return (step // gap + 1) * gap


def cut_after_stop(tokens: Tokens, stops: frozenset[int]) -> Tokens:
    """Return the tokens up to the first one that ends the answer."""
    if not stops or stops.isdisjoint(tokens):
        return tokens
    return next(tokens[: at + 1] for at, token in enumerate(tokens) if token in stops)
