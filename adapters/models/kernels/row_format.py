"""How keys and values are kept: a head's numbers in some dtype, or in 8 bits each, with one scale for all of them.

A coded row is its head's codes and behind them, in its last four bytes, the float32 that they are multiplied with. Its
bits follow from the numbers alone: nothing of other rows, of other heads or of how it came about is in them. So caches,
files and whatever moves rows see bytes, and only who writes a row or attends to it knows that they are codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

SCALE = 4  # bytes behind a head's codes
# The greatest magnitude of a code: what the greatest of a head's numbers becomes.
LIMITS: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
NAMED: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LEAST = torch.finfo(torch.float32).tiny  # of a scale: one below it has no inverse, and such a row is zeros


@frozen
class RowForm:
    """dtype: of what is kept; int8 and float8_e4m3fn are codes."""

    dtype: torch.dtype

    @property
    def coded(self) -> bool:
        return self.dtype in LIMITS

    def width(self, head: int) -> int:
        """Elements that a head of so many numbers takes."""
        return head + SCALE if self.coded else head

    def head(self, width: int) -> int:
        return width - SCALE if self.coded else width

    def encode(self, numbers: Tensor) -> Tensor:
        """`[..., hd]` of any dtype -> `[..., width]`. To the nearest code, or the even one of two."""
        if not self.coded:
            return numbers.to(self.dtype)
        wide = numbers.float()
        scale = wide.abs().amax(-1, keepdim=True) / LIMITS[self.dtype]
        scale = torch.where(scale >= LEAST, scale, torch.zeros_like(scale))
        inverse = torch.where(scale > 0, 1 / scale, scale)
        steps = wide * inverse
        codes = (steps.round() if self.dtype is torch.int8 else steps).to(self.dtype)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1).view(self.dtype)

    def decode(self, rows: Tensor) -> Tensor:
        """`[..., width]` -> `[..., hd]`: float32 of codes, and what is none as it is."""
        if not self.coded:
            return rows
        head = self.head(rows.shape[-1])
        scale = rows[..., head:].contiguous().view(torch.float32)
        return rows[..., :head].float() * scale


def form_of(cache: Tensor) -> RowForm:
    return RowForm(cache.dtype)


def row_dtype(named: str, dtype: torch.dtype) -> torch.dtype:
    """named: one of `NAMED`, or auto: as the model computes."""
    return NAMED.get(named, dtype)
