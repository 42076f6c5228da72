"""Proposals that are copied from earlier text: what followed the last time when the text ended as it does now.

Theory of operation
-------------------

Agents copy. An edit repeats most of a file, a tool's result comes back in the answer, and JSON repeats its keys. So the
tokens that followed an earlier occurrence of the same tokens are often right, and they cost no forward.

* Every slot has a text: its prompt and its answer. Every salt has an archive: the last answers of requests with that
  salt. Nothing of one salt is searched for a request of another one.
* After each decode step, `find_matches` says how many tokens before the next one agree with an earlier position. The
  core gets this number with the outcome, and learns from it how often copies are right (`states/suffix_control.py`).
  What followed there is found in the same call of the library, for all members of a batch.
* A launch comes with the number of tokens to copy for each length of match (`Copying`). `StepCopies`
  obeys it before each step. So text is copied from one step to the next without asking the core.
* The text goes on with its own copy, so a loop is continued as well.
* Copies are a chain, perhaps with one branch: how the text went on at another position with a match, where the chain
  goes on otherwise. Each search also says whether the step before would have been helped by a branch that was not
  proposed. So the core knows what branches are worth before it has paid for any.

Invariants: the same tokens in the same order give the same matches and proposals. Everything is in host memory, and
bounded: MOST_TEXT tokens of a slot (and its answer), MOST_ARCHIVED of a salt, MOST_SALTS salts. An `AnswerKeeper` may
keep the answers on disk as well, for a later server.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import add
from typing import Protocol

from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.models.kernels.interfaces.text_matching import (
    END_OF_TEXT,
    NO_BRANCH,
    Branch,
    IndexedText,
    TextBatch,
    TextMatcher,
)
from effects.ids import Tokens

MOST_TEXT = 1 << 17  # tokens of a slot that are indexed: 2 MB, some 5 ms
MOST_ARCHIVED = 1 << 16  # tokens of earlier answers that an archive keeps: 1 MB
MOST_SALTS = 16  # salts that have an archive; the one that was used least recently goes
LEAD = 8  # tokens before an answer that are archived with it, so that its beginning can be found
SHORTEST_ANSWER = 16  # tokens; a shorter answer is not archived


class AnswerKeeper(Protocol):
    """Keeps answers for the server that comes after this one."""

    def take_answers(self, salt: str, most: int) -> Sequence[Tokens]:
        """Return the answers with this salt that were kept by earlier servers, the oldest first. Each is given once.

        most: tokens of all answers together. The newest are given.
        """
        ...

    def keep_answer(self, tokens: Tokens, salt: str) -> None:
        """Keep an answer. It is written in the background."""
        ...


@define(eq=False)
class SlotText:
    """The text of a slot for one request. answer_start: the first token of `state.tokens` that was decoded here.

    text: None until it is searched for the first time, since many texts never are. left_out: tokens at the beginning of
    `state.tokens` that the text has not.
    """

    state: SlotState
    answer_start: int
    left_out: int
    text: IndexedText | None = None
    is_archived: bool = False

    @property
    def read(self) -> int:
        """The tokens of `state.tokens` that the text has, or left out."""
        return self.left_out if self.text is None else self.left_out + len(self.text)


@define(eq=False)
class SearchedTexts:
    """The texts that were searched together last. Mostly the next search is for the same ones.

    read: tokens that each text has or left out. stops: that end any of the answers.
    """

    states: Sequence[SlotState]
    batch: TextBatch
    read: list[int]
    stops: frozenset[int]

    def read_new_tokens(self) -> list[list[int]]:
        """Return the tokens of each state that its text has not yet."""
        return [state.tokens[read:] for state, read in zip(self.states, self.read, strict=True)]

    def match(self, new_tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append these tokens to the texts, and return what matches in each of them."""
        found = self.batch.match_appended(new_tokens)
        self.read = list(map(add, self.read, map(len, new_tokens)))
        return found


@define(eq=False)
class SuffixProposer:
    """Finds matches and copies proposals. Used on the lane of the decode steps only.

    answers: keeps answers beyond the end of this server; None: nothing does. vocab_size: a kept answer that has another
    token is not used.
    """

    matcher: TextMatcher
    answers: AnswerKeeper | None = None
    vocab_size: int = 1 << 31
    _texts: dict[int, SlotText] = field(init=False, factory=dict[int, SlotText])  # by slot
    _archives: dict[str, IndexedText] = field(init=False, factory=dict[str, IndexedText])  # by salt, oldest use first
    # None after anything was appended to a text or to an archive in another way.
    _searched: SearchedTexts | None = field(init=False, default=None)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that all texts take."""
        texts = (one.text.nbytes for one in self._texts.values() if one.text is not None)
        return sum(texts) + sum(one.nbytes for one in self._archives.values())

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        """Return for each slot how many tokens before the next one agree with an earlier position, at most 64.

        0 means that fewer than three do. A slot whose answer has just ended matches nothing.
        """
        states = [state for _, state in slots]
        searched = self._searched
        if searched is not None and searched.states == states:
            new_tokens = searched.read_new_tokens()
            if searched.stops.isdisjoint(chain.from_iterable(new_tokens)):
                return searched.match(new_tokens)
        self._archive_ended()
        searched = self._gather_texts(slots)
        found = searched.match(searched.read_new_tokens())
        return [0 if has_ended(state) else matched for state, matched in zip(states, found, strict=True)]

    def _gather_texts(self, slots: Sequence[tuple[int, SlotState]]) -> SearchedTexts:
        """Return the texts of these slots, as they are before any token is added."""
        known = [self._find_text(slot, state) for slot, state in slots]
        texts = [(self._make_text(text), self._find_archive(text.state.salt)) for text in known]
        states = [text.state for text in known]
        stops = frozenset[int]().union(*(state.stops for state in states))
        self._searched = SearchedTexts(states, self.matcher.make_batch(texts), [text.read for text in known], stops)
        return self._searched

    def index_texts(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        """Index what these slots have of their texts, so that `find_matches` need not do it after a step."""
        for slot, state in slots:
            known = self._find_text(slot, state)
            text = self._make_text(known)
            if len(state.tokens) > known.read:
                self._searched = None
                text.append(state.tokens[known.read :])

    def note_tokens(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        """Note that these states have the tokens of a step, where no match is asked for.

        Nothing is indexed or searched. Once these states are known, further steps with the same ones may be left out.
        """
        self._archive_ended()
        for slot, state in slots:
            self._find_text(slot, state)

    def _archive_ended(self) -> None:
        """Archive the answers that have ended since the last call, before other texts are searched for them."""
        for known in self._texts.values():
            if not known.is_archived and has_ended(known.state):
                self._archive_answer(known)

    def archive_all(self) -> None:
        """Archive all answers, because nothing is decoded any more."""
        for known in self._texts.values():
            self._archive_answer(known)

    def copy(self, slot: int, count: int) -> Tokens:
        """Return up to `count` tokens that followed at the position that `find_matches` found for the slot last."""
        text = self._texts[slot].text
        return () if text is None else text.copy(count)

    def find_branch(self, slot: int, chain: int, count: int) -> Branch:
        """Return how else the text could go on where `chain` tokens were copied: at most `count` tokens."""
        text = self._texts[slot].text
        return NO_BRANCH if text is None else text.find_branch(chain, count)

    def count_on_branch(self, slot: int) -> int:
        """Return how many tokens of the last step stand on the branch of the match before it (`Decoded.on_branch`)."""
        known = self._texts.get(slot)
        return 0 if known is None or known.text is None else known.text.on_branch

    def _find_text(self, slot: int, state: SlotState) -> SlotText:
        """Return the slot's text for this request.

        If the slot had another request before, its answer is archived, and a text without any token yet begins.
        """
        known = self._texts.get(slot)
        if known is not None:
            if known.state is state:
                return known
            self._archive_answer(known)
        count = len(state.tokens)
        begun = SlotText(state, count - 1, max(0, count - MOST_TEXT))
        self._texts[slot] = begun
        return begun

    def _make_text(self, known: SlotText) -> IndexedText:
        """Return the indexed text of a slot. It may lack the tokens of the last steps."""
        if known.text is None:
            known.text = self.matcher.make_text()
        return known.text

    def _archive_answer(self, ended: SlotText) -> None:
        """Add the answer of a request that has ended to the archive of its salt, once."""
        state = ended.state
        if ended.is_archived or len(state.tokens) - ended.answer_start < SHORTEST_ANSWER:
            return
        ended.is_archived = True
        answer = tuple(state.tokens[max(0, ended.answer_start - LEAD) :][-MOST_ARCHIVED // 2 :])
        self._find_archive(state.salt)  # what earlier servers have kept comes first
        self._extend_archive(state.salt, answer)
        if self.answers is not None and state.keeps_answer:
            self.answers.keep_answer(answer, state.salt)

    def _find_archive(self, salt: str) -> IndexedText | None:
        """Return the archive of a salt. It begins with the answers that earlier servers have kept."""
        if salt not in self._archives and self.answers is not None:
            for answer in self.answers.take_answers(salt, MOST_ARCHIVED // 2):
                if answer and min(answer) >= 0 and max(answer) < self.vocab_size:
                    self._extend_archive(salt, answer[-MOST_ARCHIVED // 2 :])
        return self._archives.get(salt)

    def _extend_archive(self, salt: str, answer: Tokens) -> None:
        """Add an answer to the archive of a salt. Where it is full, its older half goes."""
        archive = self._archives.pop(salt, None)
        if archive is None or len(archive) + len(answer) >= MOST_ARCHIVED:
            # What is left of a text that is cut in two is still text.
            newer = () if archive is None else archive.read_tail(MOST_ARCHIVED // 2 - 1)
            archive = self.matcher.make_text()
            archive.append(newer)
        archive.append((*answer, END_OF_TEXT))
        self._searched = None
        self._archives[salt] = archive
        if len(self._archives) > MOST_SALTS:
            del self._archives[next(iter(self._archives))]


def has_ended(state: SlotState) -> bool:
    """Has the answer ended with a stop token?"""
    return state.tokens[-1] in state.stops
