"""Finds where a prompt diverges from what is kept: the most similar sequence, and the tokens that it has instead.

Only the sequences behind the last matching block are compared: the next block of the same run, and the last run that
was added behind it. So the cost does not depend on how much is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from adapters.store.block_keys import TOKEN_BYTES, unpack_tokens
from effects.ports import MAX_DIVERGED_TOKENS, Divergence

if TYPE_CHECKING:
    from adapters.store.block_index import BlockIndex
    from effects.ids import Tier


def find_nearest_divergence(indices: Mapping[Tier, BlockIndex], key: bytes, at: int, rest: bytes) -> Divergence | None:
    """Return where the prompt diverges from the most similar sequence; None if nothing is kept behind the last block.

    Of sequences that are equally similar, that of the first tier counts.

    key: of the last block that is kept, `at` tokens into the prompt, or the root. rest: packed tokens of the prompt
    behind it, at least one block.
    """
    found = [
        Divergence(
            at + shared,
            unpack_tokens(other[shared * TOKEN_BYTES : (shared + MAX_DIVERGED_TOKENS) * TOKEN_BYTES]),
            number,
        )
        for number, index in indices.items()
        for other in index.get_continuations(key)
        for shared in (count_common_tokens(rest, other),)
    ]
    return max(found, key=lambda divergence: divergence.at, default=None)


def count_common_tokens(first: bytes, second: bytes) -> int:
    """Return how many tokens two packed sequences have in common at their beginning. They differ within a block."""
    shared = 0
    while (token := first[shared : shared + TOKEN_BYTES]) and token == second[shared : shared + TOKEN_BYTES]:
        shared += TOKEN_BYTES
    return shared // TOKEN_BYTES
