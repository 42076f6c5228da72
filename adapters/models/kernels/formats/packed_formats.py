"""The packed weights that have CUDA kernels. This is asked before any weight is read, and also where Triton is
missing.
"""

from __future__ import annotations

import torch

from adapters.checkpoint.packed_matrix import TABLES, StepLayout

PANEL = 32  # outputs whose weights lie together where a processor multiplies packed weights


def block_columns(layout: StepLayout) -> int:
    """Return the columns of a block, of which a lane holds four words of each row."""
    return 128 if layout.steps in TABLES else 64


def has_packed_kernel(layout: StepLayout, columns: int, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for such weights. dtype: what is computed in; tensor cores want 16 bits."""
    return (
        dtype.itemsize == 2
        and (dtype == torch.bfloat16 or layout.steps != "e2m1")
        and layout.fits(columns)
        and (layout.scale == "float16" or layout.least != "own")
        and (layout.span >= block_columns(layout) or (layout.scale != "float32" and layout.steps != "e4m3"))
    )
