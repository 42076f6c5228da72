"""The identity of a model: caches, traces and measured times of one identity are of no use for another."""

from __future__ import annotations

from hashlib import blake2b

import torch

from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint


def compute_identity(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    numerics: Numerics,
    mode: str,
    rows: torch.dtype | None = None,
    *,
    digest: str = "",
) -> str:
    """Return 32 hex digits over everything that changes numbers, and nothing about this machine.

    rows: the dtype of cached keys and values, if it is not `dtype`. digest: that of the checkpoint, if it is known
    already.
    """
    parts = (
        digest or checkpoint.digest(),
        repr(checkpoint.config),
        str(dtype) if rows in {None, dtype} else f"{dtype}, rows in {rows}",
        str(numerics.block_size),
        numerics.numerics_class,
        numerics.mode,
        # The buckets that serve: other shapes may round differently, and two starts may have proven different ones.
        repr(numerics.buckets),
        mode,
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
