"""Check that the weights of a checkpoint are finite: one tensor at a time, or all together at the end of a load."""

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

Doubt: TypeAlias = tuple[object, str, tuple[Tensor, Tensor]]  # where a tensor lies, its name, least and greatest
_doubts: ContextVar[list[Doubt] | None] = ContextVar("doubts", default=None)


def check_finite(tensor: Tensor, where: object, name: str) -> None:
    """Raises CheckpointError, here or where `told_together` ends. At the speed of memory; `isfinite` takes twenty times
    as long. A NaN is the least and the greatest at once.
    """
    if not tensor.numel():
        return
    doubt, later = (where, name, tensor.aminmax()), _doubts.get()
    if later is None:
        tell([doubt])
    else:
        later.append(doubt)


@contextmanager
def told_together() -> Iterator[None]:
    """Whether what is read in here is finite is told at its end: a GPU that is asked of each tensor keeps the host
    waiting for as long as all the rest of loading takes. Raises CheckpointError there.
    """
    doubts = list[Doubt]()
    outer = _doubts.set(doubts)
    try:
        yield
    finally:
        _doubts.reset(outer)
    tell(doubts)


def tell(doubts: Iterable[Doubt]) -> None:
    """Raises CheckpointError for one that is not finite. A device is waited for once for each of its types."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[Doubt]](list)
    for doubt in doubts:
        least = doubt[2][0]
        alike[least.device, least.dtype].append(doubt)
    for some in alike.values():
        extremes = torch.stack([one for *_, both in some for one in both]).view(-1, 2).tolist()
        for (where, name, _), both in zip(some, extremes, strict=True):
            if not all(map(math.isfinite, both)):
                raise CheckpointError(f"{where}: {name} has values that are no numbers, or infinite")
