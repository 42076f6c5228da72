"""What a step tells the kernels is the same whichever way it is written."""

from __future__ import annotations

import pytest
import torch

from adapters.models.drafts.mtp.draft import HeadBatch
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import LISTED, Batch, BlockBatch, StateBatch

CPU = torch.device("cpu")
BUCKET = 2 * LISTED


def batch_of(kind: str) -> Batch:
    if kind == "plain":
        return Batch(BUCKET, CPU)
    if kind == "head":
        return HeadBatch(BUCKET, CPU, slots_held=3)
    return BlockBatch(BUCKET, CPU) if kind == "block" else StateBatch(BUCKET, CPU)


@pytest.mark.parametrize("kind", ["plain", "block", "state", "head"])
@pytest.mark.parametrize("rows", [LISTED, LISTED + 1, BUCKET - 1, BUCKET])
@pytest.mark.parametrize("given", ["tensor", "list", "none"])
def test_wide_steps_are_told_as_narrow_ones_are(kind: str, rows: int, given: str) -> None:
    step, numbers = Step((Segment(2, 77, rows),), BUCKET), [5 * row + 1 for row in range(rows)]
    tokens = {"tensor": torch.tensor(numbers), "list": numbers, "none": None}[given]
    one, other = batch_of(kind), batch_of(kind)
    for each in (one, other):
        if isinstance(each, BlockBatch | StateBatch):
            each.before = (64,)
        each._staging.fill_(99)  # noqa: SLF001 - what an earlier step has left
    one.load(step, tokens)
    other._write(step, None if tokens is None else numbers)  # noqa: SLF001 - the way of narrow ones
    assert torch.equal(one.table, other.table)
    assert one.tokens.tolist() == [*([0] * rows if tokens is None else numbers), *[0] * (BUCKET - rows)]
    assert one.positions.tolist() == [*range(77, 77 + rows), *[-1] * (BUCKET - rows)]
