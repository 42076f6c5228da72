"""The format of cached keys and values: a head's numbers in some dtype, or 8-bit codes with one scale for the whole
head.

A coded row holds its head's codes and, in its last four bytes, the float32 scale that they are multiplied with. Its
bits follow from its own numbers alone. Caches, files and transfers see bytes; only the code that writes a row or
attends to it knows that they are codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

SCALE = 4  # bytes behind a head's codes
# The greatest magnitude of a code, which the greatest number of a head is scaled to.
LIMITS: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
DTYPE_NAMES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a smaller scale has no inverse, so such a row becomes zeros


@frozen
class RowFormat:
    """The format of cached rows. dtype: of the stored elements; int8 and float8_e4m3fn are codes."""

    dtype: torch.dtype

    @property
    def is_coded(self) -> bool:
        """True if rows are codes with a scale."""
        return self.dtype in LIMITS

    def row_width(self, head: int) -> int:
        """Return how many elements a head of this many numbers takes."""
        return head + SCALE if self.is_coded else head

    def head_size(self, width: int) -> int:
        """Return how many numbers a head has whose row takes this many elements."""
        return width - SCALE if self.is_coded else width

    def encode(self, numbers: Tensor) -> Tensor:
        """Encode `[..., hd]` of any dtype to `[..., width]`. Codes are rounded to the nearest one, ties to even."""
        if not self.is_coded:
            return numbers.to(self.dtype)
        wide = numbers.float()
        scale = wide.abs().amax(-1, keepdim=True) / LIMITS[self.dtype]
        scale = torch.where(scale >= SMALLEST_SCALE, scale, torch.zeros_like(scale))
        inverse = torch.where(scale > 0, 1 / scale, scale)
        steps = wide * inverse
        codes = (steps.round() if self.dtype is torch.int8 else steps).to(self.dtype)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1).view(self.dtype)

    def decode(self, rows: Tensor) -> Tensor:
        """Decode `[..., width]` to `[..., hd]`: codes become float32, other rows stay as they are."""
        if not self.is_coded:
            return rows
        head = self.head_size(rows.shape[-1])
        scale = rows[..., head:].contiguous().view(torch.float32)
        return rows[..., :head].float() * scale


def format_of(cache: Tensor) -> RowFormat:
    return RowFormat(cache.dtype)


def row_dtype(named: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cached rows. named: a key of DTYPE_NAMES, or auto for the model's own dtype."""
    return DTYPE_NAMES.get(named, dtype)
