"""A single row of the gated delta rule on a CPU, as decoding has one for each slot.

It has the bits of `delta.py` in fewer calls, because calls are what a single row costs.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.functions.vector_functions import apply_in_vectors
from adapters.models.kernels.interfaces.delta_interface import BLOCK, CHUNK, RING, DeltaShape, DeltaState

# What a row of a chunk reads of the blocks before its own.
_EARLY = (torch.arange(CHUNK) < torch.arange(CHUNK).unsqueeze(1) // BLOCK * BLOCK).float()

# Sums are subtracted from it, as in `invert_blocks`: this makes +0 of a sum that is zero, a negation would make -0.
_NOTHING = torch.zeros(())


@frozen(eq=False)
class RowBuffers:
    """Operands of products with as many rows as were proven. The row's own data comes first; the other rows are
    always zero. M: the least row count that was proven for these products.
    """

    keys: Tensor  # [Nk, M, dk]
    shared: Tensor  # [Nv, M, dk]
    chunk: Tensor  # [Nv, M, 64]
    block: Tensor  # [Nv, M, 16]

    @classmethod
    def of(cls, shape: DeltaShape, rows: int) -> RowBuffers:
        heads = shape.value_heads
        size = shape.key_size
        sizes = ((shape.key_heads, size), (heads, size), (heads, CHUNK), (heads, BLOCK))
        return cls(*(torch.zeros(count, rows, width) for count, width in sizes))


@frozen(eq=False)
class DeltaRow:
    """The inputs of one row. asking: the query of each key head, then its key, `[Nk, 2, dk]`; in a `ChunkPiece` keys
    come first. value: `[Nv, dv]`. beta, and decay, which is the logarithm g: `[Nv, 1]`.
    """

    asking: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor


def read_row(
    buffers: RowBuffers, shape: DeltaShape, state: DeltaState, slot: int, position: int, row: DeltaRow
) -> Tensor:
    """Return what the row reads, `[Nv, dv]`, and leave in the rings what later rows need of it.

    The slot's memory stands at the start of the row's chunk. position: of the row in its sequence.
    """
    heads = shape.value_heads
    group = shape.group
    first = position % CHUNK
    start = position // CHUNK * CHUNK % RING
    rings = (state.keys, state.deltas, state.decays, state.values, state.factors)
    keys, deltas, decays, values, factors = (ring[slot].narrow(1, start, CHUNK) for ring in rings)
    if not first:
        for ring in (keys, deltas, decays, values, factors):
            ring.zero_()
    keys[:, first] = row.asking[:, 1]
    buffers.keys[:, :2] = row.asking
    alike = torch.bmm(buffers.keys, keys.transpose(1, 2))[:, :2]
    buffers.shared.view(shape.key_heads, group, -1, shape.key_size)[:, :, :2] = row.asking.unsqueeze(1)
    known = torch.bmm(buffers.shared, state.memory[slot])
    total = decays[:, first - 1 : first] + row.decay if first else row.decay
    decays[:, first : first + 1] = total
    faded = apply_in_vectors(torch.exp, total - decays)
    faded[:, first + 1 :] = 0.0
    decay = apply_in_vectors(torch.exp, torch.nn.functional.pad(total, (0, CHUNK - 1)))[:, :1]
    seen = (alike.unsqueeze(1) * faded.view(-1, group, 1, CHUNK)).view(heads, 2, CHUNK)
    own = seen[:, 1] * row.beta
    wanted = (row.value - known[:, 1] * decay) * row.beta
    block = first - first % BLOCK
    here = first % BLOCK
    if block:
        torch.mul(own, _EARLY[first], out=buffers.chunk[:, 0])
        wanted = wanted - torch.bmm(buffers.chunk, deltas)[:, 0]
    values[:, first] = wanted
    inverse = buffers.block[:, 0]
    if here:
        factors[:, first] = 0.0  # of a row that was taken back; the sums go past the last one before it
        terms = slice(block, block + (1 << (here - 1).bit_length() if here > 1 else 1))
        sums = own[:, terms].unsqueeze(2) * factors[:, terms, :BLOCK]
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        torch.sub(_NOTHING, sums[:, 0], out=inverse)
    else:
        inverse.zero_()
    inverse[:, here] = 1.0
    factors[:, first, :BLOCK] = inverse
    deltas[:, first] = torch.bmm(buffers.block, values.narrow(1, block, BLOCK))[:, 0]
    buffers.chunk[:, 0] = seen[:, 0]
    return known[:, 0] * decay + torch.bmm(buffers.chunk, deltas)[:, 0]
