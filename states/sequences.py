"""Token sequences: how much of one is whole blocks, and how many tokens two of them have in common."""

from __future__ import annotations

from effects.ids import Tokens
from effects.packed_tokens import PACKED_BYTES
from states.settings import Settings

# Blocks of the longest pieces that are compared. Larger copies are mapped anew by the C library each time: a prompt of
# 12,000 tokens took 49 us to compare with each slot, and 12 with this limit.
LONGEST_PIECE = 16


def round_down_to_block(settings: Settings, tokens: int) -> int:
    """Return the last multiple of the block size that is not beyond `tokens`."""
    return tokens // settings.block_size * settings.block_size


def count_continuable_rows(settings: Settings, rows: Tokens, prompt: Tokens) -> int:
    """Count the rows of a slot that a prompt can be continued from. rows: the tokens that they stand for.

    They are whole blocks that both begin with. The last token of a prompt is always computed.
    """
    shared = count_common_blocks(settings.block_size, rows, prompt)
    return round_down_to_block(settings, min(shared, len(prompt) - 1))


def count_common_blocks(block_size: int, first: Tokens, second: Tokens) -> int:
    """Count the tokens that both begin with, in whole blocks.

    As long as pieces are equal, the next piece is twice as long, up to LONGEST_PIECE blocks.
    """
    limit = min(len(first), len(second)) // block_size * block_size
    start = 0
    step = block_size
    while start < limit:
        stop = min(start + step, limit)
        if first[start:stop] == second[start:stop]:
            start = stop
            step = min(2 * step, LONGEST_PIECE * block_size)
        elif step > block_size:
            step //= 2
        else:
            return start
    return limit


def count_common_packed_blocks(block_size: int, first: bytes, second: bytes) -> int:
    """Count the tokens that both begin with, in whole blocks, of packed tokens (`effects.packed_tokens`)."""
    width = block_size * PACKED_BYTES
    limit = min(len(first), len(second)) // width * width
    start = 0
    for step in (LONGEST_PIECE * width, LONGEST_PIECE // 4 * width, width):
        while start < limit and first.startswith(second[start : min(start + step, limit)], start):
            start = min(start + step, limit)
    return start // PACKED_BYTES


def count_common_tokens(first: Tokens, second: Tokens) -> int:
    """Count the tokens that both begin with, exactly."""
    start = count_common_blocks(64, first, second)
    for token, other_token in zip(first[start : start + 64], second[start : start + 64], strict=False):
        if token != other_token:
            break
        start += 1
    return start
