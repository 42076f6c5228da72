"""Where a prompt leaves what is kept: the sequence that is the likest, and what it has instead of the rest.

What hangs on the last block that is there is looked at, and nothing else: the next block of the same run, and the last
run that came behind it. So this costs the same however much is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from adapters.store.block_keys import WIDTH, unpack
from effects.ports import MAX_DIVERGED_TOKENS, Divergence

if TYPE_CHECKING:
    from adapters.store.block_index import Index
    from adapters.store.tier import StateCheckpoint


def nearest(indices: Mapping[StateCheckpoint, Index], key: bytes, at: int, rest: bytes) -> Divergence | None:
    """key: of the last block that is kept, `at` tokens into the prompt, or the root. rest: packed tokens of the prompt
    behind it, a block at least.
    """
    found = [
        Divergence(at + shared, unpack(other[shared * WIDTH : (shared + MAX_DIVERGED_TOKENS) * WIDTH]), place)
        for place, index in indices.items()
        for other in index.following(key)
        for shared in (alike(rest, other),)
    ]
    return max(found, key=lambda one: one.at, default=None)


def alike(one: bytes, other: bytes) -> int:
    """Tokens that two packed sequences begin with alike; they differ within a block."""
    shared = 0
    while (token := one[shared : shared + WIDTH]) and token == other[shared : shared + WIDTH]:
        shared += WIDTH
    return shared // WIDTH
