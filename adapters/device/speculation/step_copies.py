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
from effects.decode import FRUITLESS_TEXTS, RunDecode, choose_search_gap, find_match_class, share_rows
from effects.ids import SlotId, Tokens

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
    has_matched: any search has found something. Such a text asks before its launch ends.
    group: the class of the match that the last search found, of a text with `length` tokens; -1: none.
    """

    slot: SlotId
    state: SlotState
    since: int
    due: int
    has_matched: bool = False
    group: int = -1
    length: int = 0


@define(eq=False)
class StepCopies:
    """Says what is copied. proposer: None where no text is searched. capacity: rows of a slot."""

    proposer: TextProposer | None
    capacity: int
    # Slots in which the last search found a match. Mostly there are none, and then no request is looked up.
    _matching: set[int] = field(init=False, factory=set[int])
    _searches: dict[int, TextSearch] = field(init=False, factory=dict[int, TextSearch])  # by slot
    _states: list[SlotState] = field(init=False, factory=list[SlotState])  # of the last step
    _any_has_matched: bool = field(init=False, default=False)  # any text of the last step's requests
    _steps: int = field(init=False, default=0)  # of all launches
    _next_search: int = field(init=False, default=0)  # number of the step after which a text of `_states` may be due
    # Requests in a row whose texts were searched and never had a match. It ends with the next first match of a text.
    _unmatched_texts: int = field(init=False, default=0)

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
        asking = [member.effect.copying is not None for member in members]
        if self._any_has_matched and not all(asking):
            asking = [asks or self._asks_at_end(member) for asks, member in zip(asking, members, strict=True)]
        if True in asking:
            return self._search(members, asking)
        if self._matching:
            self._matching.difference_update([member.effect.slot for member in members])
        return [0] * len(members)

    def _asks_at_end(self, member: CopyingMember) -> bool:
        """Is this the last step of the member's launch, and did its text have a match before?"""
        return member.is_last_step and self._searches[member.effect.slot].has_matched

    def _note_members(self, members: Sequence[CopyingMember], states: list[SlotState]) -> None:
        """Note that the step has other requests than the one before. If some have only ended, nothing is due sooner."""
        assert self.proposer is not None
        if not set(self._states).issuperset(states):
            self._next_search = 0
        searches = [self._find_search(member) for member in members]
        self._states = states
        self._any_has_matched = any(search.has_matched for search in searches)
        self.proposer.note_tokens([(search.slot, search.state) for search in searches])

    def _find_search(self, member: CopyingMember) -> TextSearch:
        """Return the searches of a member's text. They begin anew if its slot has another request than before."""
        slot = member.effect.slot
        known = self._searches.get(slot)
        if known is not None:
            if known.state is member.state:
                return known
            self._matching.discard(slot)
            self._unmatched_texts += known.due > 0 and not known.has_matched
        begun = self._searches[slot] = TextSearch(slot, member.state, len(member.state.tokens), 0)
        return begun

    def _search(self, members: Sequence[CopyingMember], asking: Sequence[bool]) -> Sequence[int]:
        """Search the texts that are due, and note which have a match and when the others are searched again."""
        assert self.proposer is not None
        step = self._steps
        asked = [self._searches[member.effect.slot] for member, asks in zip(members, asking, strict=True) if asks]
        if self._unmatched_texts >= FRUITLESS_TEXTS:
            self._put_off_first_searches(asked, len(members))
        due = [search for search in asked if search.due <= step]
        found = self.proposer.find_matches([(search.slot, search.state) for search in due]) if due else ()
        if len(found) == len(members) and all(found):
            self._note_matches(due, found)
            self._next_search = step + 1
            return found
        matched = [search for search, length in zip(due, found, strict=True) if length]
        self._note_matches(matched, list(filter(None, found)))
        self._note_unmatched([search for search, length in zip(due, found, strict=True) if not length], len(members))
        # The launch of another member may end at any step. If its text has matched, it asks then.
        may_ask = len(asked) < len(members) and self._any_has_matched
        self._next_search = step + 1 if may_ask or matched else min(search.due for search in asked)
        lengths = dict(zip([search.slot for search in due], found, strict=True))
        return [lengths.get(member.effect.slot, 0) for member in members]

    def _put_off_first_searches(self, searches: Sequence[TextSearch], members: int) -> None:
        """Choose when texts are searched that were never searched, where the last texts had no match."""
        gap = self._choose_gap(0, members, has_matched=False)
        for search in searches:
            if not search.due and not search.has_matched:
                search.due = find_next_step(self._steps - 1, gap)

    def _choose_gap(self, unmatched: int, members: int, *, has_matched: bool) -> int:
        """Return after how many steps a text is searched again. The arguments are those of `choose_search_gap`."""
        return choose_search_gap(unmatched, members, has_matched=has_matched, unmatched_texts=self._unmatched_texts)

    def _note_matches(self, searches: Sequence[TextSearch], lengths: Sequence[int]) -> None:
        """Note that these searches have found matches of these lengths."""
        for search, length in zip(searches, lengths, strict=True):
            search.group = find_match_class(length)
            search.length = len(search.state.tokens)
            if search.since >= 0:
                search.since = -1
                search.due = 0
            if not search.has_matched:
                search.has_matched = True
                self._any_has_matched = True
                self._unmatched_texts = 0
        self._matching.update([search.slot for search in searches])

    def _note_unmatched(self, searches: Sequence[TextSearch], members: int) -> None:
        """Note that these searches have found nothing, and choose when the texts are searched again.

        members: requests of the step.
        """
        due_steps = dict[tuple[int, bool], int]()  # by the tokens without a match: many texts have the same number
        for search in searches:
            tokens = len(search.state.tokens)
            if search.since < 0:
                search.since = tokens
            search.group = -1
            self._matching.discard(search.slot)
            key = tokens - search.since, search.has_matched
            if key not in due_steps:
                gap = self._choose_gap(key[0], members, has_matched=key[1])
                due_steps[key] = find_next_step(self._steps, gap)
            search.due = due_steps[key]

    def archive_all(self) -> None:
        """Keep the answers of all slots for a later server. Called when nothing is decoded any more."""
        if self.proposer is not None:
            self.proposer.archive_all()

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
        row_limit = MOST_ROWS
        for member in members:
            effect, state = member
            copying = effect.copying
            group = self.find_class(effect, state)
            if group < 0 or copying is None:
                continue
            length = min(copying.counts[group], effect.steps - 1, self.capacity - state.valid - 1)
            if length > 0:
                asking.append((member, length, copying.branches[group]))
                row_limit = min(row_limit, copying.rows)
        if not asking:
            self._forget_left([member.effect.slot for member in members])
            return NO_COPIES
        chains: dict[int, Tokens] = {}
        branches: dict[int, Branch] = {}
        shares = share_rows([length + branch for _, length, branch in asking], row_limit - len(members))
        for (member, wanted_length, branch_length), share in zip(asking, shares, strict=True):
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

    def has_match(self, members: Sequence[CopyingMember]) -> bool:
        """Would one of these copy text in its next step?"""
        if not self._matching:
            return False
        if any(self.find_class(member.effect, member.state) >= 0 for member in members):
            return True
        self._forget_left([member.effect.slot for member in members])
        return False

    def _forget_left(self, slots: Iterable[int]) -> None:
        """Forget all matches if none is of these slots, those of the members. The requests that had them have left.

        Otherwise members would be looked up before each step. A request that comes back is searched after its next
        step.
        """
        if self._matching.isdisjoint(slots):
            self._matching.clear()

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
        if copying is None or not copying.steps or effect.slot not in self._matching:
            return -1
        known = self._searches[effect.slot]
        if known.state is not state or known.length != len(state.tokens):
            return -1  # the match was one of another request, or of fewer tokens
        return known.group if copying.counts[known.group] else -1


def find_next_step(step: int, gap: int) -> int:
    """Return the number of the first step behind this one that divides by the gap: all texts are due together."""
    return (step // gap + 1) * gap


def cut_after_stop(tokens: Tokens, stops: frozenset[int]) -> Tokens:
    """Return the tokens up to the first one that ends the answer."""
    if not stops or stops.isdisjoint(tokens):
        return tokens
    return next(tokens[: at + 1] for at, token in enumerate(tokens) if token in stops)
