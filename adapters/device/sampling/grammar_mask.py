"""Masks of the tokens that a grammar allows, which are put on logits before a token is picked.

A row of a decode step may stand behind proposals that are not accepted yet. So a mask is asked for by the path of
proposals that leads to the row. This is the interface that the device needs; `adapters.text` implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from adapters.models.kernels.interfaces.sampling_interface import TokenMask
from effects.grammar import Grammar
from effects.ids import Tokens

EIGHT = (1, 2, 4, 8, 16, 32, 64, 128)

Mask: TypeAlias = TokenMask


class Matching(Protocol):
    """The progress of one answer through its grammar. Every call runs on the lane."""

    def mask(self, path: Tokens) -> Mask | str:
        """Return which tokens may follow the answer and then `path`, at least one; or a text that says why none may."""
        ...

    def count_allowed(self, path: Tokens) -> int:
        """Return how many tokens of `path` may follow the answer."""
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer. Each of them was allowed."""
        ...


# Makes one for a new answer. Raises ValueError for a grammar that cannot be used.
Match: TypeAlias = Callable[[Grammar], Matching]


def refuse_grammars(_: Grammar) -> Matching:
    """Refuse every grammar; used where no text model is loaded."""
    raise ValueError("nothing here reads grammars")


def build_forbidden_mask(masks: Sequence[Mask | None], vocab: int, device: torch.device) -> Tensor:
    """Return True where a token may not follow: bool `[rows, V]`, all False for a row without a mask.

    Tokens beyond the end of a mask may not follow. One bit per token travels to the device, not one byte.
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
    """Return the value of each bit of a byte, on the device."""
    return torch.tensor(EIGHT, dtype=torch.uint8, device=device)
