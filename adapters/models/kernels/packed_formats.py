"""Which packed weights are multiplied as they are on CUDA. Asked before any is read, and where there is no Triton."""

from __future__ import annotations

import torch

from adapters.checkpoint.packed_matrix import TABLES, StepLayout


def block_of(layout: StepLayout) -> int:
    """Columns of which a lane has four words of each row."""
    return 128 if layout.steps in TABLES else 64


def served(layout: StepLayout, columns: int, dtype: torch.dtype) -> bool:
    """Whether there are kernels for such weights. dtype: what is computed in; tensor cores want 16 bits."""
    return (
        dtype.itemsize == 2
        and layout.fits(columns)
        and (layout.scale == "float16" or layout.least != "own")
        and (layout.span >= block_of(layout) or (layout.scale != "float32" and layout.steps != "e4m3"))
    )
