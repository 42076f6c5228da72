"""The identity of a model: caches, traces and measured times of one identity are of no use for another."""

from __future__ import annotations

from hashlib import blake2b

import torch

from adapters.models.kernels.formats.row_format import Rows, row_types
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint


def compute_identity(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    numerics: Numerics,
    mode: str,
    rows: Rows | None = None,
    *,
    digest: str = "",
) -> str:
    """Return 32 hex digits over everything that changes numbers, and nothing about this machine.

    rows: the types of cached keys and values, if they are not `dtype`. digest: that of the checkpoint, if it is known
    already.
    """
    types = row_types(rows or dtype)
    parts = (
        digest or checkpoint.digest(),
        repr(checkpoint.config),
        str(dtype) if types == row_types(dtype) else f"{dtype}, rows in torch.{types.name}",
        str(numerics.block_size),
        numerics.numerics_class,
        numerics.mode,
        # The buckets that serve: other shapes may round differently, and two starts may have proven different ones.
        repr(numerics.buckets),
        mode,
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


class IdentityMismatch(Exception):
    """The model's identity, which is the argument, is not the one that is wanted."""


def check_identity(found: str, expected: str | None) -> None:
    """Raise IdentityMismatch for another identity than the expected one. None: any will do."""
    if expected not in {None, found}:
        raise IdentityMismatch(found)
