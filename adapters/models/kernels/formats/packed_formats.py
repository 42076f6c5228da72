"""The packed weights that have CUDA kernels. This is asked before any weight is read, and also where Triton is
missing.
"""

from __future__ import annotations

import math

import torch

from adapters.checkpoint.packed_matrix import TABLES, StepLayout

PANEL = 32  # outputs whose weights lie together where a processor multiplies packed weights
RECORD = 128  # columns whose levels lie together on a GPU, in whole words of 32 bits


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


def count_device_bits(layout: StepLayout) -> float:
    """Return the average number of bits of one weight on a GPU. Levels of a record are whole words there. Scales of
    E4M3 are in float32, and those of E2M1 are exponents of eight bits.
    """
    scale = {"e4m3": 32, "e2m1": 8}.get(layout.steps, 8 * getattr(torch, layout.scale).itemsize)
    scales = max(1, RECORD // layout.span) * (2 if layout.least == "own" else 1)
    numbers = max(1, RECORD // layout.group) * (layout.inner + bool(layout.least))
    words = math.ceil((scale * scales + 8 * numbers) / 32)
    return (4 if layout.steps in TABLES else 8) + 32 * words / RECORD
