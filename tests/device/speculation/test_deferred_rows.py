"""Rows that a draft follows later: whichever steps deferred them, it gets the hidden states of their positions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from attrs import define, field
from torch import Tensor

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.deferred_rows import DeferredBatch
from adapters.device.speculation.draft_context import FORGOTTEN, DraftContext
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Segment, Step
from effects.ids import RequestId

LAYERS = (1, 4)
BUCKETS = (4, 8, 16, 32)
SLOTS = 5


def name_rows(segments: Sequence[Segment], bucket: int) -> Mapping[int, Tensor]:
    """Return hidden states `[bucket, 3]` that say which row they are of: slot, position and layer."""
    rows = [[one.slot, one.start + row] for one in segments for row in range(one.count)]
    rows += [[-1, -1]] * (bucket - len(rows))
    return {layer: torch.tensor([[*row, layer] for row in rows]) for layer in LAYERS}


@define(eq=False)
class ReadingDraft:
    """Checks the hidden states of the rows that it follows. extended: the steps in which it did."""

    aux_layers: Sequence[int] = LAYERS
    weights_state: str = "loaded"
    extended: list[Step] = field(factory=list[Step])

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        expected = name_rows(step.segments, step.bucket)
        for layer in LAYERS:
            assert torch.equal(aux_hidden_states[layer][: step.rows], expected[layer][: step.rows])
        assert tokens.tolist() == [one.start + row for one in step.segments for row in range(one.count)]
        self.extended.append(step)


@define(eq=False)
class Target:
    """Slots whose tokens are their positions, and steps of them."""

    context: DraftContext[Any] = field(factory=lambda: DraftContext(cast("Any", ReadingDraft()), BUCKETS))
    slots: list[SlotState] = field(factory=lambda: [a_state(request) for request in range(SLOTS)])

    def step(self, *counts: tuple[int, int], proposed: int = 0, plain_steps: int = 0) -> None:
        """Compute this many rows of these slots. proposed: rows of the first slot that are taken back."""
        (slot, count), *others = counts
        rows = ((slot, count + proposed), *others)
        segments = tuple(Segment(slot, self.slots[slot].valid, count) for slot, count in rows)
        step = Step(segments, next(size for size in BUCKETS if size >= sum(one.count for one in segments)))
        kept: list[Kept] = [count for _, count in counts]
        states = [self.slots[slot] for slot, _ in counts]
        for state, stays in zip(states, kept, strict=True):
            state.valid += cast("int", stays)
        self.context.follow(step, name_rows(segments, step.bucket), kept, states, plain_steps)

    def step_fused(self, slot: int, plain_steps: int = 0) -> None:
        """Compute a row in a step that puts its hidden states into the backlog itself, if it may."""
        state = self.slots[slot]
        place = self.context.find_next_row(slot, state)
        if place is None:
            self.step((slot, 1), plain_steps=plain_steps)
            return
        for layer, states in name_rows([Segment(slot, state.valid, 1)], 1).items():
            place.rows.aux_hidden_states[layer][place.rows.first + place.rows.count] = states[0]
        place.rows.count += 1
        state.valid += 1

    def reopen(self, slot: int) -> None:
        self.slots[slot] = a_state(self.slots[slot].request + SLOTS)
        self.context.inherit_rows(slot, slot, self.slots[slot])

    def catch_up(self, *slots: int) -> None:
        self.context.catch_up(*slots)
        for slot in slots:
            state = self.slots[slot]
            first, stop = state.draft_rows
            assert stop == state.valid
            assert stop - first >= min(stop, self.context.backlog // 2), "only the oldest rows are dropped"


def a_state(request: int) -> SlotState:
    return SlotState(RequestId(request), list(range(400)), 0, cast("Any", None))


def do_anything(target: Target, rng: random.Random) -> None:
    """Take steps that may come after each other, each kind for a while."""
    slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
    times = rng.randint(1, 20)
    match rng.randrange(6):
        case 0 | 1:
            for _ in range(times):
                target.step(*[(slot, 1) for slot in slots])
        case 2:
            for _ in range(times):
                target.step_fused(slots[0], rng.choice((0, 0, 300)))
        case 3:
            target.step(*[(slot, 1) for slot in slots[1:]], (slots[0], rng.randint(1, 8)))
        case 4:
            for proposed in (0, 0, 3, 0, 0):
                target.step(*[(slot, 1) for slot in slots], proposed=proposed)
        case _:
            target.catch_up(*slots)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_followed_with_its_own_hidden_states(seed: int) -> None:
    rng = random.Random(seed)
    target = Target()
    for _ in range(60):
        do_anything(target, rng)
        for slot, state in enumerate(target.slots):
            if state.valid > 300:
                target.reopen(slot)
    target.catch_up(*range(SLOTS))
    assert target.context.draft.extended


@pytest.mark.timeout(60)
def test_a_draft_follows_nothing_while_many_plain_steps_lie_ahead() -> None:
    target = Target()
    backlog = target.context.backlog
    forgotten = backlog // FORGOTTEN
    for left in range(3 * backlog, 0, -1):
        target.step_fused(0, left)
    assert not target.context.draft.extended
    for _ in range(forgotten + 1):
        target.step_fused(0, forgotten - 1)
    assert len(target.context.draft.extended) == 1, "a full backlog is followed where a proposal may come soon"
    target.reopen(1)
    for left in range(3 * backlog, forgotten, -1):
        target.step_fused(1, left)
    target.catch_up(1)
    assert len(target.context.draft.extended) == 2, "what is left of the backlog takes one forward"


@pytest.mark.timeout(60)
def test_a_batch_that_goes_on_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[DeferredBatch]()

    def make(*fields: Any) -> DeferredBatch:
        made.append(DeferredBatch(*fields))
        return made[-1]

    monkeypatch.setattr("adapters.device.speculation.draft_context.DeferredBatch", make)
    target = Target()
    for _ in range(20):
        target.step((0, 1), (1, 1), (2, 1))
    assert len(made) == 1
    target.step((0, 1), (1, 1))
    target.step((0, 1), (1, 1), (2, 1))
    assert len(made) == 3
    target.catch_up(1)
    assert target.slots[1].draft_rows == (0, 22)
    target.step((0, 1), (1, 1), (2, 1))
    target.catch_up(0, 1, 2)
    assert [state.draft_rows for state in target.slots[:3]] == [(0, 23), (0, 23), (0, 22)]
