"""`--draft X+suffix` with each kind of draft: whichever is expected to give more proposes. Answers stay as they are.

Texts repeat themselves, so most steps have a match. What is expected of either kind is given, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import pytest
from attrs import define, evolve, field

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposal_tree import Tree
from adapters.device.speculation.proposer import DraftRequest, Proposer, TextProposer
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.kernels.interfaces.text_matching import Branch
from effects.decode import MATCH_CLASSES, find_match_class
from effects.ids import RequestId, Tokens
from effects.job import Job
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from states.rates import ClassGains, Rates, TimedStep
from states.speculation_control import list_widths
from states.suffix_control import list_copy_widths
from tests.e2e.test_kinds_of_drafts import save
from tests.e2e.test_speculation import FLAT, SAMPLINGS, answers, words
from tests.pairs import with_first

pytestmark = pytest.mark.skipif(build_text_matcher() is None, reason="there is no compiled library")
ANSWER = 40
# The names of `--draft`, or kinds of random drafts that are made for the model.
DRAFTS = {"DFlash": "demo", "MTP": "demo-hybrid"}
RANDOM = ("DFlash 2", "DSpark", "GGUF", "GGUF of DFlash 2", "EAGLE-3", "GGUF of EAGLE-3")
CASES = [*DRAFTS, *(pytest.param(kind, marks=pytest.mark.long) for kind in RANDOM)]


Step: TypeAlias = tuple[RequestId, int]  # a request, and the tokens of its text before the step


def find_step(state: SlotState) -> Step:
    return state.request, len(state.tokens)


@define(eq=False)
class CountedDraft(Proposer):
    """A draft that notes the steps in which it was asked."""

    drafting: Proposer
    asked: set[Step] = field(factory=set)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Tree]:
        self.asked |= {find_step(request.state) for request in requests}
        return self.drafting.propose(requests)

    def follow(self, *how) -> None:
        self.drafting.follow(*how)

    def catch_up(self, slot) -> None:
        self.drafting.catch_up(slot)

    def inherit_rows(self, *how) -> None:
        self.drafting.inherit_rows(*how)


@define(eq=False)
class CountedCopies(TextProposer):
    """Copies as usual, and notes the class of the match in each step that copies."""

    searched: TextProposer
    copied: dict[Step, int] = field(factory=dict)
    _matches: dict[int, tuple[Step, int]] = field(factory=dict)  # by slot

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        found = self.searched.find_matches(slots)
        for (slot, state), matched in zip(slots, found, strict=True):
            self._matches[slot] = find_step(state), find_match_class(matched)
        return found

    def index_texts(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        self.searched.index_texts(slots)

    def note_tokens(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        self.searched.note_tokens(slots)

    def copy(self, slot: int, count: int) -> Tokens:
        step, group = self._matches[slot]
        self.copied[step] = group
        return self.searched.copy(slot, count)

    def find_branch(self, slot: int, chain: int, count: int) -> Branch:
        return self.searched.find_branch(slot, chain, count)

    def count_on_branch(self, slot: int) -> int:
        return self.searched.count_on_branch(slot)


@pytest.fixture(scope="module", params=CASES)
async def target(request, tmp_path_factory) -> AsyncIterator[LoadedModel]:
    kind = request.param
    model = DRAFTS.get(kind, "demo")
    draft = "auto" if kind in DRAFTS else save(tmp_path_factory.mktemp("draft"), model, kind)
    shape = {"device": "cpu", "max_ctx": 1024, "disk_prefix_cache": "off", "host_cache_budget": 0}
    loaded = await load_target(build_options(model=model, draft=f"{draft}+suffix", **shape))
    assert loaded.settings.max_proposals
    assert loaded.settings.max_copied
    yield loaded
    await loaded.close()


def expecting(target: LoadedModel, drafted: int, *copied: int) -> Rates:
    """Rates by which so many drafted tokens are right in a step, and so many copied ones after a match of each class.

    Both kinds of steps take as long as a plain one.
    """
    settings = target.settings
    widths = list_copy_widths(settings)
    return evolve(
        FLAT,
        gains=tuple(min(drafted, 1000 * width) for width in list_widths(settings)),
        copied=tuple(ClassGains(64, tuple(min(one, 1000 * width) for width in widths)) for one in copied),
        copy_times=tuple(TimedStep(0, members, 128, 1001, 1000) for members in range(1, 9)),
        copy_steps_until_trial=512,
        steps_until_trial=512,
    )


async def give_answers(
    target: LoadedModel, rates: Rates, jobs: Sequence[Job]
) -> tuple[list, CountedDraft, CountedCopies]:
    parts = target.executor.parts
    assert parts.proposer is not None
    assert parts.text_proposer is not None
    counted = CountedDraft(parts.proposer), CountedCopies(parts.text_proposer)
    target.executor = DeviceExecutor(evolve(parts, proposer=counted[0], text_proposer=counted[1]))
    found = await answers(target, jobs, rates=rates, at_once=2)
    target.executor = DeviceExecutor(parts)
    return words(found), *counted


def make_jobs(target: LoadedModel) -> list[Job]:
    step = 37
    lines = [tuple(100 + (line * step + at) % 900 for at in range(12)) for line in range(3)]
    prompt = tuple(token for _ in range(5) for line in lines for token in line)
    return [
        Job(prompt[: 150 - 7 * number], ANSWER, sampling=sampling, scope=Scope("off"))
        for number, sampling in enumerate(SAMPLINGS)
    ]


EVERY = (0,) * len(MATCH_CLASSES)


@with_first("target")
@pytest.mark.timeout(300)
async def test_whichever_expects_more_proposes(target: LoadedModel) -> None:
    jobs = make_jobs(target)
    plain, *silent = await give_answers(target, FLAT, [evolve(job, speculate=False) for job in jobs])
    assert not silent[0].asked
    assert not silent[1].copied
    found, draft, copies = await give_answers(target, expecting(target, 0, *[3000] * len(EVERY)), jobs)
    assert found == plain
    assert copies.copied, "copies are expected to be right, and the draft is not"
    assert not draft.asked & set(copies.copied), "either the draft proposes or text is copied"
    found, draft, copies = await give_answers(target, expecting(target, 3000, *EVERY), jobs)
    assert found == plain
    assert draft.asked, "the draft is expected to be right"
    assert not copies.copied


@pytest.mark.timeout(300)
@with_first("target")
async def test_a_draft_proposes_where_matches_are_too_short_to_be_worth_more(target: LoadedModel) -> None:
    """The draft is expected to be right about one token, copies after short matches about none."""
    jobs = make_jobs(target)
    plain, *_ = await give_answers(target, FLAT, [evolve(job, speculate=False) for job in jobs])
    worth = [0, 0, 3000, 3000, 3000]
    found, draft, copies = await give_answers(target, expecting(target, 1000, *worth), jobs)
    assert found == plain
    assert draft.asked
    assert copies.copied
    assert not draft.asked & set(copies.copied)
    assert min(copies.copied.values()) >= 2, "shorter matches are worth less than the draft"
