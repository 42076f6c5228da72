"""Checks that the weights of a checkpoint are finite: each tensor at once, or all together at the end of a load."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError

# Where a tensor lies, its name, and its least and greatest value on the tensor's device.
PendingCheck: TypeAlias = tuple[object, str, tuple[Tensor, Tensor]]
_doubts: ContextVar[list[PendingCheck] | None] = ContextVar("doubts", default=None)


def check_finite(tensor: Tensor, where: object, name: str) -> None:
    """Raise CheckpointError for a tensor that is not finite, here or at the end of `defer_finite_checks`.

    This runs at the speed of memory. `isfinite` takes twenty times as long. A NaN is both the least and the greatest.
    """
    if not tensor.numel():
        return
    doubt = (where, name, tensor.aminmax())
    later = _doubts.get()
    if later is None:
        raise_for_non_finite([doubt])
    else:
        later.append(doubt)


@contextmanager
def defer_finite_checks() -> Iterator[None]:
    """Check all tensors that are read in this context at its end. Raises CheckpointError there.

    Asking a GPU for the result of each tensor would make the host wait for as long as the rest of loading takes.
    """
    doubts = list[PendingCheck]()
    outer = _doubts.set(doubts)
    try:
        yield
    finally:
        _doubts.reset(outer)
    raise_for_non_finite(doubts)


def raise_for_non_finite(doubts: Iterable[PendingCheck]) -> None:
    """Raise CheckpointError for a tensor that is not finite. This waits for each device once per element type."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[PendingCheck]](list)
    for doubt in doubts:
        least = doubt[2][0]
        alike[least.device, least.dtype].append(doubt)
    for some in alike.values():
        extremes = torch.stack([extreme for *_, both in some for extreme in both]).view(-1, 2).tolist()
        for (where, name, _), both in zip(some, extremes, strict=True):
            if not all(map(math.isfinite, both)):
                raise CheckpointError(f"{where}: {name} has values that are no numbers, or infinite")
