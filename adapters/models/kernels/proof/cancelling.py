"""Operands of trials whose products are sums that cancel, so that any other order of adding shows in their bits."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import TABLES, PackedMatrix, StepLayout
from adapters.models.kernels.functions.seeded import make_generator

_MOST = 1 << 22  # random elements of a weight; a larger one repeats them


def make_cancelling(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x `[rows, inputs]` and w `[outputs, inputs]` whose products are sums of pairs that cancel each other.

    They are the same for the same shape. Rounded to bfloat16 an ordinary sum hides most changes of its order. Of a
    cancelling sum only rounding errors are left, which no other order repeats.
    """
    generator = make_generator(rows * 31 + inputs)
    half = -(-inputs // 2)
    own = max(1, min(outputs, _MOST // inputs))
    order = torch.randperm(half, generator=generator)
    x = torch.randn(rows, half, generator=generator)
    w = torch.randn(own, half, generator=generator)
    x = torch.cat((x, -x[:, order]), 1)[:, :inputs]
    w = torch.cat((w, w[:, order]), 1)[:, :inputs].to(dtype)
    return x.to(dtype).contiguous(), w.repeat(-(-outputs // own), 1)[:outputs].contiguous()


def make_cancelling_packed(
    shape: tuple[int, int, int], layout: StepLayout, dtype: torch.dtype
) -> tuple[Tensor, PackedMatrix]:
    """Return x `[rows, inputs]` and a packed weight whose products are such sums. shape: rows, outputs, inputs.

    The weight's groups occur twice, and x has the opposite sign for the second half.
    """
    rows, outputs, inputs = shape
    generator = make_generator(rows * 31 + inputs)
    half = -(-inputs // 2 // layout.span) * layout.span
    own = max(1, min(outputs, _MOST // inputs))

    def twice(one: Tensor, each: int) -> Tensor:
        whole = torch.cat((one, one), 1)[:, : inputs // each]
        return whole.repeat(-(-outputs // own), 1)[:outputs].contiguous()

    def level(each: int) -> Tensor:
        return twice(torch.randint(1, 60, (own, half // each), generator=generator, dtype=torch.int8), each)

    def scale() -> Tensor:
        found = torch.rand(own, half // layout.span, generator=generator) + 0.5
        return twice(found.to(getattr(torch, layout.scale)), layout.span)

    steps = torch.randint(0, 15 if layout.steps in TABLES else 120, (own, half), generator=generator, dtype=torch.uint8)
    x = torch.randn(rows, half, generator=generator)
    matrix = PackedMatrix(
        layout,
        twice(steps.to(torch.int8) if layout.steps == "int8" else steps, 1),
        scale(),
        level(layout.group) if layout.inner else None,
        level(layout.group) if layout.least else None,
        scale() if layout.least == "own" else None,
    )
    return torch.cat((x, -x), 1)[:, :inputs].to(dtype).contiguous(), matrix
