"""What a grammar lets follow, row by row: masks that are put on logits before a token is picked.

A row of a verifying step stands behind proposals that may yet be refused, so a mask is asked for by the path that leads
to it. Whoever knows grammars answers; here is what the device needs of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from adapters.models.kernels.sampling_interface import TokenMask
from effects.grammar import Grammar
from effects.ids import Tokens

EIGHT = (1, 2, 4, 8, 16, 32, 64, 128)

Mask: TypeAlias = TokenMask


class Matching(Protocol):
    """One answer's way through its grammar. Every call runs on the lane's thread."""

    def mask(self, path: Tokens) -> Mask | str:
        """Which tokens may follow the answer so far and then `path`: at least one. A text: none, and why."""
        ...

    def fitting(self, path: Tokens) -> int:
        """How many tokens of `path` may follow the answer so far."""
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """These are part of the answer now; each was allowed."""
        ...


# Makes one for a new answer. Raises ValueError for a grammar that cannot be used.
Match: TypeAlias = Callable[[Grammar], Matching]


def no_grammars(_: Grammar) -> Matching:
    """Where nobody knows any."""
    raise ValueError("nothing here reads grammars")


def forbidden(masks: Sequence[Mask | None], vocab: int, device: torch.device) -> Tensor:
    """True where a token may not follow: bool `[rows, V]`, all False for a row without a mask.

    A bit a token travels to the device, not a byte; ids that no mask tells of may not follow.
    """
    packed = torch.zeros((len(masks), -(-vocab // 8)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for row, mask in zip(packed.numpy(), masks, strict=True):
        if mask is None:
            row.fill(255)
        else:
            row[: len(mask)] = mask[: len(row)]
    return (packed.to(device, non_blocking=True).unsqueeze(-1) & bits_on(device)).eq(0).flatten(1)[:, :vocab]


@cache
def bits_on(device: torch.device) -> Tensor:
    return torch.tensor(EIGHT, dtype=torch.uint8, device=device)
