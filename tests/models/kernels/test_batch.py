"""Tests that a step gives the kernels the same values whichever way it is written."""

from __future__ import annotations

import pytest
import torch

from adapters.models.drafts.chained_batch import ChainedBatch
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import LISTED, Batch, BlockBatch, StateBatch

CPU = torch.device("cpu")
BUCKET = 2 * LISTED


def batch_of(kind: str) -> Batch:
    if kind == "plain":
        return Batch(BUCKET, CPU)
    if kind == "head":
        return ChainedBatch(BUCKET, CPU, slots_held=3)
    return BlockBatch(BUCKET, CPU) if kind == "block" else StateBatch(BUCKET, CPU)


@pytest.mark.parametrize("kind", ["plain", "block", "state", "head"])
@pytest.mark.parametrize("rows", [LISTED, LISTED + 1, BUCKET - 1, BUCKET])
@pytest.mark.parametrize("given", ["tensor", "list", "none", "several segments"])
def test_wide_steps_are_told_as_narrow_ones_are(kind: str, rows: int, given: str) -> None:
    counts = [rows - 70, 1, 69] if given == "several segments" else [rows]
    starts = (77, 640, 5)
    segments = tuple(Segment(2 + index, starts[index], count) for index, count in enumerate(counts))
    step, numbers = Step(segments, BUCKET), [5 * row + 1 for row in range(rows)]
    tokens = {"list": numbers, "none": None}.get(given, torch.tensor(numbers))
    one, other = batch_of(kind), batch_of(kind)
    for each in (one, other):
        if isinstance(each, BlockBatch | StateBatch):
            each.before = (64, 640, 0)[: len(counts)]
        each._staging.fill_(99)  # noqa: SLF001 - what an earlier step has left
    one.load(step, tokens)
    other._write(step, None if tokens is None else numbers)  # noqa: SLF001 - the way of narrow ones
    assert torch.equal(one.table, other.table)
    assert one.tokens.tolist() == [*([0] * rows if tokens is None else numbers), *[0] * (BUCKET - rows)]
    positions = [starts[index] + row for index, count in enumerate(counts) for row in range(count)]
    assert one.positions.tolist() == [*positions, *[-1] * (BUCKET - rows)]


@pytest.mark.parametrize(
    ("counts", "rows_only", "settled", "kind"),
    [
        ((1, 1), False, [0, 0], "single"),
        ((1, 64), False, [0] * 65, "layers"),
        ((1, 65), False, [0] + [1] * 65, "mixed"),
        ((65,), False, [1] * 65, "held"),
        ((1, 65), True, [1] * 66, "settled"),
    ],
    ids=str,
)
def test_rows_of_a_prompt_settle_if_they_are_too_many_to_be_rolled_back(
    counts: tuple[int, ...], rows_only: bool, settled: list[int], kind: str
) -> None:
    batch = StateBatch(BUCKET, CPU)
    batch.before = (0,) * len(counts)
    step = Step(tuple(Segment(slot, 0, count) for slot, count in enumerate(counts)), BUCKET, rows_only=rows_only)
    batch.settle(step)
    batch.load(step, None)
    assert batch.settled.tolist() == [*settled, *[0] * (BUCKET - len(settled))]
    assert batch.kind == kind
    assert batch.settles == (kind in {"held", "settled"})
    assert batch.holds == (kind in {"held", "mixed"})


@pytest.mark.parametrize("kind", ["plain", "state"])
def test_a_wide_step_of_several_slots_is_written_as_narrow_ones_are(kind: str) -> None:
    """Decode rows, and the rows of a prompt that settle."""
    segments = (*(Segment(slot, 60 + slot, 1) for slot in range(16)), Segment(20, 128, LISTED))
    step = Step(segments, BUCKET)
    tokens = torch.arange(step.rows)
    one, other = batch_of(kind), batch_of(kind)
    for each in (one, other):
        if isinstance(each, StateBatch):
            each.before = (*(0 if slot < 4 else 64 for slot in range(16)), 128)
        each._staging.fill_(99)  # noqa: SLF001 - what an earlier step has left
    one.load(step, tokens)
    other._write(step, tokens.tolist())  # noqa: SLF001 - the way of narrow ones
    assert torch.equal(one.table, other.table)
