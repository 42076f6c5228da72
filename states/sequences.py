"""Token sequences: what of them is whole blocks, and what two of them have in common."""

from __future__ import annotations

from effects.ids import Tokens
from states.settings import Settings


def whole_blocks(settings: Settings, tokens: int) -> int:
    """The last cache position at or before `tokens`."""
    return tokens // settings.block_size * settings.block_size


def continued(settings: Settings, rows: Tokens, prompt: Tokens) -> int:
    """How many of a slot's rows, which stand for these tokens, a prompt can be continued from.

    Whole blocks of what both begin with. The last prompt token is always computed.
    """
    return whole_blocks(settings, min(common(settings.block_size, rows, prompt), len(prompt) - 1))


def common(block_size: int, one: Tokens, other: Tokens) -> int:
    """Tokens that both begin with, in whole blocks."""
    limit = min(len(one), len(other)) // block_size * block_size
    for start in range(0, limit, block_size):
        if one[start : start + block_size] != other[start : start + block_size]:
            return start
    return limit


def alike(one: Tokens, other: Tokens) -> int:
    """Tokens that both begin with, exactly."""
    start = common(64, one, other)
    for mine, its in zip(one[start : start + 64], other[start : start + 64], strict=False):
        if mine != its:
            break
        start += 1
    return start
