"""What a model's numbers are known by: caches, traces and measured times of one identity are of no other."""

from __future__ import annotations

from hashlib import blake2b

import torch

from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint


def identity(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    numerics: Numerics,
    mode: str,
    rows: torch.dtype | None = None,
    *,
    digest: str = "",
) -> str:
    """Everything that changes numbers, and nothing about this instance: 32 hex digits. rows: what keys and values are
    kept in; by default the dtype. digest: the checkpoint's, where somebody has it already.
    """
    parts = (
        digest or checkpoint.digest(),
        repr(checkpoint.config),
        str(dtype) if rows in {None, dtype} else f"{dtype}, rows in {rows}",
        str(numerics.block_size),
        numerics.numerics_class,
        numerics.mode,
        repr(numerics.buckets),  # what serves: other shapes may round otherwise, and two starts may have proven others
        mode,
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
