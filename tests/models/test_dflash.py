"""The DFlash draft against the formulas and against transformers, and its bits against every way of getting there."""

from __future__ import annotations

import pytest
import torch

from adapters.models.dflash import Ask
from adapters.models.kernels.reference import ReferenceKernels
from tests.models.drafts import (
    GEOMETRIES,
    captures_of,
    draft_of,
    extend_in_pieces,
    random_tensors,
    slow_logits,
)

LENGTH = 700
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[*GEOMETRIES])
def config(request):
    return GEOMETRIES[request.param]


def block_of(config, token: int, rows: int) -> list[int]:
    return [token, *[config.mask_token_id] * (rows - 1)]


def distance(a, b) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kernels", [None, ReferenceKernels()], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_proposals_are_those_of_the_formulas(config, dtype, kernels):
    tensors = random_tensors(config)
    if dtype is torch.bfloat16:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
    draft = draft_of(config, tensors, dtype, kernels=kernels)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 6e-2}[dtype]
    for length, first in ((90, 0), (90, 70), (3, 3)):
        rows = captures_of(config, length, dtype)
        extend_in_pieces(draft, rows, [(64, 64)], slot=2)
        found = draft.propose([Ask(2, first, length, 17, config.block - 1)])
        table = draft._head.embedding  # noqa: SLF001 - the target's, which the test made
        block = block_of(config, 17, config.block)
        expected = slow_logits(config, tensors, table, captures=rows, first=first, tokens=block)[1:]
        assert found.shape == expected.shape
        assert distance(found, expected) < tolerance
