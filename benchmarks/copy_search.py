"""Measures what copies of earlier text cost the host: searching and copying for all members of a decode step.

`python -m benchmarks.copy_search [--members 1,32] [--rounds 40] [--record]`; no model and no device are involved.

Every member has a prompt of code and repeats it in its answer, one token in each step. So each step finds matches of up
to 64 tokens, and copies 15 tokens for every member. Times are those of the processor, on the thread that searches: the
median of all steps of a round, and of the quickest round, because other programs take from the processor's caches.
Index: the first step, which reads the prompts. Step: searching and copying. Outcome: what is said of copies once the
step has been verified, which is not part of the figure. New text: the mean of NEW_STEPS steps in which every member
gives random tokens. Nothing matches then, so most steps are not searched.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, cast

from attrs import frozen

from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import StepMember
from adapters.device.speculation.proposer import DecodingSlot
from adapters.device.speculation.step_copies import StepCopies
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.subjects import prompts
from benchmarks.tables import median, print_table
from effects.decode import MATCH_CLASSES, Copying, RunDecode
from effects.ids import RequestId, SlotId, Tokens

LONGEST = 2048  # tokens of a prompt
WIDTH = 15  # tokens that are copied for a member
NEW_STEPS = 256  # of text that repeats nothing
VOCAB = 1 << 17
GOALS_US = {32: 100}  # by the number of members


@frozen
class StepCost:
    """Nanoseconds of one step: of finding the matches of all members, of copying for them, and of saying so."""

    search: int
    copy: int
    outcome: int


def make_members(texts: Sequence[Tokens]) -> list[DecodingSlot]:
    """Return one member for each prompt, of a launch that copies after every match."""
    rule = Copying((WIDTH,) * len(MATCH_CLASSES), len(texts) * (1 + WIDTH), 1 << 30)
    members = list[DecodingSlot]()
    for index, text in enumerate(texts):
        # Nothing is picked, so there is no sampler.
        state = SlotState(RequestId(index), list(text), len(text) - 1, cast("Sampler", None))
        effect = RunDecode(SlotId(index), len(text) - 1, text[-1], steps=1 << 30, copying=rule)
        members.append(DecodingSlot(effect, state))
    return members


def run_steps(texts: Sequence[Tokens], steps: int) -> list[StepCost]:
    """Take steps in which every member gives the next token of its own prompt, and then copies."""
    matcher = build_text_matcher()
    assert matcher is not None, "there is no compiled library"
    copies = StepCopies(SuffixProposer(matcher), 1 << 20)
    members = make_members(texts)
    slots = [(effect.slot, state) for effect, state in members]
    costs = list[StepCost]()
    for step in range(steps):
        for text, (_, state) in zip(texts, slots, strict=True):
            state.tokens.append(text[step])
        started_ns = time.thread_time_ns()
        copies.find_matches(members)
        searched_ns = time.thread_time_ns()
        chosen = copies.choose(members)
        copied_ns = time.thread_time_ns()
        verified = [
            StepMember(slot, slot, state, chosen.build_tree(slot, state.tokens[-1]))
            for slot, state in slots
            if slot in chosen.chains
        ]
        built_ns = time.thread_time_ns()
        copies.count_copies(verified, chosen)
        counted_ns = time.thread_time_ns()
        costs.append(StepCost(searched_ns - started_ns, copied_ns - searched_ns, counted_ns - built_ns))
        copied = sum(map(len, chosen.chains.values()))
        assert step < MATCH_CLASSES[-1] or copied == WIDTH * len(texts), "something else"
    return costs


def run_round(texts: Sequence[Tokens]) -> StepCost:
    """Return the median cost of a step. Every member repeats as much as the shortest prompt has."""
    _, *costs = run_steps(texts, min(map(len, texts)))
    parts = zip(*((one.search, one.copy, one.outcome) for one in costs), strict=True)
    return StepCost(*(round(median(part)) for part in parts))


def time_new_text(texts: Sequence[Tokens], seed: int) -> int:
    """Return the nanoseconds of a step in which nothing matches, the mean of NEW_STEPS steps behind these prompts."""
    rng = random.Random(seed)
    matcher = build_text_matcher()
    assert matcher is not None, "there is no compiled library"
    copies = StepCopies(SuffixProposer(matcher), 1 << 20)
    members = make_members(texts)
    spent = 0
    for step in range(1 + NEW_STEPS):
        for _, state in members:
            state.tokens.append(rng.randrange(VOCAB))
        started_ns = time.thread_time_ns()
        copies.find_matches(members)
        spent += time.thread_time_ns() - started_ns if step else 0  # the first step indexes the prompts
    return spent // NEW_STEPS


def measure(counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    [texts] = prompts(["code"], max(counts), LONGEST).values()
    rows = list[dict[str, Any]]()
    for count in counts:
        asked = texts[:count]
        best = min((run_round(asked) for _ in range(rounds)), key=lambda one: one.search + one.copy)
        index = min(run_steps(asked, 1)[0].search for _ in range(rounds))
        sizes = {"members": count, "prompt tokens": sum(map(len, asked)), "index us": index / 1e3}
        spent = {"search us": best.search / 1e3, "copy us": best.copy / 1e3}
        new = min(time_new_text(asked, seed) for seed in range(rounds))
        steps = {"step us": (best.search + best.copy) / 1e3, "new text us": new / 1e3}
        rows.append(sizes | spent | steps | {"outcome us": best.outcome / 1e3})
    return rows


def make_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    return [
        Figure(
            "speculation",
            f"host cost of copies, a step{of}",
            f"{row['members']} members",
            "us",
            row[part],
            goal=Goal(at_most=GOALS_US[row["members"]]) if row["members"] in GOALS_US else None,
        )
        for part, of in (("step us", ""), ("new text us", " of new text"))
        for row in rows
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--members", default="1,32")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    rows = measure([int(count) for count in given.members.split(",")], given.rounds)
    print_table("Host cost of copies", rows)
    publish(given, "copy_search", {"rows": rows}, make_figures(rows), "cpu")


if __name__ == "__main__":
    main()
