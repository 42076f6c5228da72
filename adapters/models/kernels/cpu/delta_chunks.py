"""A chunk's rows of the gated delta rule on a CPU, the pieces in which a step brings them, and the factor of a block.

`delta.py` computes with them. The head of `delta_interface.py` defines A, G, T, u and d, that of `delta.py` the
inverse D of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, frozen
from torch import Tensor

from adapters.models.kernels.interfaces.delta_interface import BLOCK, CHUNK, RING, DeltaState

_ROWS = torch.arange(CHUNK).unsqueeze(1)
_COLUMNS = torch.arange(CHUNK)
LATER = _COLUMNS > _ROWS  # not seen by a row of the chunk
HERE = _COLUMNS >= _ROWS // BLOCK * BLOCK  # of the row's own block, or later


@frozen(eq=False)
class ChunkRows:
    """The rows of one chunk of one slot, `[heads, 64, ...]`, in the rings or in a copy; rows that are not computed
    yet are zero.

    values: what blocks correct once the blocks before them have been applied. factors: the rows of D.
    """

    keys: Tensor
    deltas: Tensor
    decays: Tensor
    values: Tensor
    factors: Tensor

    @classmethod
    def in_rings(cls, state: DeltaState, slot: int, chunk: int) -> ChunkRows:
        """Return views of the chunk's rows in the rings."""
        rows = slice(chunk * CHUNK % RING, chunk * CHUNK % RING + CHUNK)
        rings = (state.keys, state.deltas, state.decays, state.values, state.factors[..., :BLOCK])
        return cls(*(ring[slot, :, rows] for ring in rings))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keys, self.deltas, self.decays, self.values, self.factors)

    def copy_rows(self, *, empty: bool) -> ChunkRows:
        """Return the rows in memory of their own, or zeros of the same shape."""
        return ChunkRows(*((torch.zeros_like(one) if empty else one.clone()) for one in self.tensors()))

    def clear(self) -> None:
        for one in self.tensors():
            one.zero_()


@define(eq=False)
class ChunkPiece:
    """Rows `[first, first + count)` of a chunk. seen, own: factors of what rows read of corrections, and of what they
    subtract for them.
    """

    frame: ChunkRows
    first: int
    count: int
    asking: Tensor  # the rows' keys, then their queries, repeated for value heads: [Nv, 2 count, dk]
    beta: Tensor  # [Nv, count, 1]
    values: Tensor  # [Nv, count, dv]
    decay: Tensor  # e^G, [Nv, count, 1]
    own: Tensor  # A, [Nv, count, 64]
    seen: Tensor  # [Nv, count, 64]

    @property
    def stop(self) -> int:
        return self.first + self.count


def invert_blocks(pieces: Sequence[ChunkPiece]) -> None:
    """Compute D of the pieces' rows, one row of every block at a time. All pieces have the same rows of their chunks.

    D_i = e_i - sum_{j<i} A_ij D_j within the block. The terms are added in pairs, in an order that does not depend on
    the other pieces. Terms beyond the row are zero, so the first rows need fewer of them.
    """
    first = pieces[0].first
    stop = pieces[0].stop
    heads = len(pieces[0].own)
    blocks = range(first // BLOCK, -(-stop // BLOCK))
    span = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
    shape = (len(pieces) * heads, len(blocks), BLOCK, BLOCK)
    inverse = torch.cat([piece.frame.factors[:, span] for piece in pieces]).view(shape)
    own = inverse.new_zeros(len(pieces) * heads, len(blocks) * BLOCK, CHUNK)
    torch.cat([piece.own for piece in pieces], out=own[:, first - span.start : stop - span.start])
    own = own.view(len(own), len(blocks), BLOCK, CHUNK)
    columns = [slice(block * BLOCK, block * BLOCK + BLOCK) for block in blocks]
    own = torch.stack([own[:, number, :, those] for number, those in enumerate(columns)], 1)
    for row in range(BLOCK):
        having = [number for number, block in enumerate(blocks) if first <= block * BLOCK + row < stop]
        if not having:
            continue
        some = slice(having[0], having[-1] + 1)
        terms = 1 << (row - 1).bit_length() if row > 1 else row
        into = inverse[:, some, row]
        into.zero_()
        if terms:
            sums = own[:, some, row, :terms].unsqueeze(-1) * inverse[:, some, :terms]
            while sums.shape[2] > 1:
                half = sums.shape[2] // 2
                sums = sums[:, :, :half] + sums[:, :, half:]
            into.sub_(sums[:, :, 0])
        into[..., row] = 1.0
    for piece, found in zip(pieces, torch.split(inverse.flatten(1, 2), heads), strict=True):
        piece.frame.factors[:, first:stop] = found[:, first - span.start : stop - span.start]
