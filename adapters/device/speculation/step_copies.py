"""The tokens that each request of a decode step copies from earlier text.

The launch says how many tokens to copy after a match of each length (`Copying`); the text proposer finds the matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import NOT_COPIED, CopyCounts, StepMember
from adapters.device.speculation.proposer import NO_COPIES, CopiedTexts, DecodingSlot, TextProposer
from adapters.models.kernels.interfaces.text_matching import Branch
from effects.decode import RunDecode, choose_search_gap, find_match_class, share_rows
from effects.ids import Tokens


class CopyingMember(Protocol):
    """A request that decodes: its decode step, and the state of its slot."""

    effect: RunDecode
    state: SlotState


class UnmatchedText(NamedTuple):
    """A text whose last search found nothing."""

    state: SlotState
    since: int  # its tokens at the first of the searches in a row that found nothing
    due: int  # the number of the step after which it is searched again


class WantedCopies(NamedTuple):
    """The copies that a member would take if the step had rows for all: tokens of a chain, and of its branch."""

    member: DecodingSlot
    length: int
    branch: int
    row_limit: int  # of the step, as its rule says


@define(eq=False)
class StepCopies:
    """Says what is copied. proposer: None where no text is searched. capacity: rows of a slot."""

    proposer: TextProposer | None
    capacity: int
    # Slots in which the last search found a match. Mostly there are none, and then no request is looked up.
    _matching: set[int] = field(init=False, factory=set[int])
    _unmatched: dict[int, UnmatchedText] = field(init=False, factory=dict[int, UnmatchedText])  # by slot
    _states: list[SlotState] = field(init=False, factory=list[SlotState])  # of the last step
    _steps: int = field(init=False, default=0)  # of all launches
    _next_search: int = field(init=False, default=0)  # number of the step after which a text of `_states` is due

    def index_texts(self, members: Sequence[CopyingMember]) -> None:
        """Index the texts of members whose matches will be asked for. Called while the device is at their first step.

        A prompt of 32,000 tokens takes 1 ms, which its first token would wait for otherwise.
        """
        if self.proposer is not None and members:
            asking = [member for member in members if asks_for_matches(member.effect)]
            self.proposer.index_texts([(member.effect.slot, member.state) for member in asking])

    def find_matches(self, slots: Sequence[tuple[int, SlotState]], *, is_asked: bool) -> Sequence[int]:
        """Return `Decoded.matched` for slots whose states have the tokens of a step already.

        is_asked: a member may copy in its next step (`asks_for_matches`). If none may, nothing is searched, and 0 is
        returned for every slot. Otherwise texts that have had no match for long are searched after some steps only, all
        after the same ones (`choose_search_gap`). Between two searches they match nothing.

        Most steps have the requests of the step before and nothing to search. They end here before anything is done
        for single requests, because code and texts have left the processor's caches since the step before.
        """
        if self.proposer is None:
            return [0] * len(slots)
        self._steps += 1
        states = [state for _, state in slots]
        is_changed = states != self._states
        self._states = states
        if is_asked:
            if is_changed or self._steps >= self._next_search:
                return self._search(slots)
            return [0] * len(slots)
        self._next_search = 0
        if is_changed:
            self.proposer.note_tokens(slots)
        if self._matching:
            self._matching.difference_update([slot for slot, _ in slots])
        return [0] * len(slots)

    def _search(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        """Search the texts that are due, and note which have a match and when the others are searched again."""
        assert self.proposer is not None
        step = self._steps
        due = list[tuple[int, SlotState]]()
        searches = list[int]()  # the next one of each text
        for slot, state in slots:
            known = self._unmatched.get(slot)
            if known is None or known.state is not state or known.due <= step:
                due.append((slot, state))
            else:
                searches.append(known.due)
        matches = dict.fromkeys([slot for slot, _ in slots], 0)
        found = self.proposer.find_matches(due) if due else ()
        for (slot, state), matched in zip(due, found, strict=True):
            if matched:
                matches[slot] = matched
                self._matching.add(slot)
                self._unmatched.pop(slot, None)
                searches.append(step + 1)
                continue
            self._matching.discard(slot)
            known = self._unmatched.get(slot)
            since = known.since if known is not None and known.state is state else len(state.tokens)
            gap = choose_search_gap(len(state.tokens) - since, len(slots))
            following = (step // gap + 1) * gap
            self._unmatched[slot] = UnmatchedText(state, since, following)
            searches.append(following)
        self._next_search = min(searches, default=step + 1)
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
        asking = [one for one in map(self._find_wanted, members) if one is not None]
        if not asking:
            return NO_COPIES
        rows = min(one.row_limit for one in asking) - len(members)
        shares = share_rows([one.length + one.branch for one in asking], rows)
        chains: dict[int, Tokens] = {}
        branches: dict[int, Branch] = {}
        for one, share in zip(asking, shares, strict=True):
            effect, state = one.member
            slot = effect.slot
            length = min(one.length, share)
            if not length:
                continue
            copied = proposer.copy(slot, length)
            chain = cut_after_stop(copied, state.stops)
            if not chain:
                continue
            chains[slot] = chain
            if one.branch:
                fork, tokens = proposer.find_branch(slot, len(copied), min(one.branch, share - length))
                depth = min(effect.steps, self.capacity - state.valid) - 1
                branch = cut_after_stop(tokens, state.stops)[: depth - fork]
                if branch and fork < len(chain):
                    branches[slot] = Branch(fork, branch)
        return CopiedTexts(chains, branches)

    def _find_wanted(self, member: DecodingSlot) -> WantedCopies | None:
        """Return what a member would copy if the step had rows for all; None if it copies nothing."""
        effect, state = member
        copying = effect.copying
        group = self.find_class(effect, state)
        if group < 0 or copying is None:
            return None
        length = min(copying.counts[group], effect.steps - 1, self.capacity - state.valid - 1)
        return WantedCopies(member, length, copying.branches[group], copying.rows) if length > 0 else None

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


def asks_for_matches(effect: RunDecode) -> bool:
    """May the request copy text in the step after this one?

    It has a rule for copies, or this is its last step before the core may give it one.
    """
    return effect.copying is not None or effect.steps <= 1


def cut_after_stop(tokens: Tokens, stops: frozenset[int]) -> Tokens:
    """Return the tokens up to the first one that ends the answer."""
    if stops.isdisjoint(tokens):
        return tokens
    return next(tokens[: at + 1] for at, token in enumerate(tokens) if token in stops)
