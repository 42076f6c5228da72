"""The gated delta rule on a CPU: batched products with numbers of rows that were proven, whatever a step brings.

A row is computed in the frame of its chunk of 64, from the state at the chunk's start and the rows before it there:
sums are as wide as the chunk, what a row must not see is zero in them. The factor T is applied in blocks of 16 rows:
what the blocks before correct is taken off u first, then the inverse D of the block itself is applied. D does not
depend on the state, so that of all whole chunks is made at once, a row of every block at a time.

Outside of products only correctly rounded operations touch the rows, as everywhere on the CPU (`torch_cpu.py`), and
functions that run on whole vectors (`by_vectors`). Decays are added up one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor

from adapters.models.kernels.cpu.convolution_taps import TapsByPlace
from adapters.models.kernels.cpu.delta_row import DeltaRow, RowBuffers, read_row
from adapters.models.kernels.delta_interface import (
    BLOCK,
    CHUNK,
    RING,
    TAPS,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    row_state,
)
from adapters.models.kernels.product_list import BATCHED, NATIVE, ProductPlan, Unproven
from adapters.models.kernels.step import Segment
from adapters.models.kernels.step_batch import StateBatch
from adapters.models.kernels.vector_functions import by_vectors, silu

_ROWS = torch.arange(CHUNK).unsqueeze(1)
_COLUMNS = torch.arange(CHUNK)
_LATER = _COLUMNS > _ROWS  # not seen by a row of the chunk
_HERE = _COLUMNS >= _ROWS // BLOCK * BLOCK  # of the row's own block, or later


@frozen(eq=False)
class ChunkRows:
    """A chunk's rows of one slot, `[heads, 64, ...]`, in the rings or beside them; what is not computed yet is zero.

    values: what blocks are to correct once those before them have. factors: the rows of D.
    """

    keys: Tensor
    deltas: Tensor
    decays: Tensor
    values: Tensor
    factors: Tensor

    @classmethod
    def of(cls, state: DeltaState, slot: int, chunk: int) -> ChunkRows:
        """In the rings."""
        rows = slice(chunk * CHUNK % RING, chunk * CHUNK % RING + CHUNK)
        rings = (state.keys, state.deltas, state.decays, state.values, state.factors[..., :BLOCK])
        return cls(*(ring[slot, :, rows] for ring in rings))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keys, self.deltas, self.decays, self.values, self.factors)

    def beside(self, *, empty: bool) -> ChunkRows:
        """Of its own memory."""
        return ChunkRows(*((torch.zeros_like(one) if empty else one.clone()) for one in self.tensors()))

    def empty(self) -> None:
        for one in self.tensors():
            one.zero_()


@define(eq=False)
class Piece:
    """Rows `[first, first + count)` of a chunk. seen, own: what rows read of corrections, and take off for them."""

    frame: ChunkRows
    first: int
    count: int
    asking: Tensor  # keys, then queries, [Nk, 2 count, dk]
    beta: Tensor  # [Nv, count, 1]
    values: Tensor  # [Nv, count, dv]
    decay: Tensor  # e^G, [Nv, count, 1]
    own: Tensor  # A, [Nv, count, 64]
    seen: Tensor  # [Nv, count, 64]

    @property
    def stop(self) -> int:
        return self.first + self.count


class CpuDelta:
    """plan: with how many rows products run; None: with whatever comes, and nothing is promised."""

    def __init__(self, plan: ProductPlan | None) -> None:
        self._plan = plan
        self._taps = TapsByPlace()
        self._buffers: dict[DeltaShape, RowBuffers] = {}

    def state(self, shape: DeltaShape, slots: int, places: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
        return row_state(shape, slots, places, dtype, device)

    # --- the convolution ---

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        taps = self._taps.of(weights)
        found, row = mixed.new_zeros(mixed.shape, dtype=torch.float32), 0
        for segment, base in zip(batch.segments, batch.before, strict=True):
            slot, start, count = segment.slot, segment.start, segment.count
            ring, own, at = state.inputs[slot], mixed[row : row + count], base % RING
            held = start - base
            before = ring[at + max(0, held - TAPS + 1) : at + held]
            window = torch.cat((state.conv[slot], before, own))[-count - TAPS + 1 :]
            wide, total = window.float(), found[row : row + count]
            if count == 1:
                terms = wide * taps
                torch.add(terms[:1], terms[1:2], out=total)
                total.add_(terms[2]).add_(terms[3])
            else:
                torch.mul(wide[:count], taps[0], out=total)
                for tap in range(1, TAPS):
                    total += wide[tap : tap + count] * taps[tap]
            end = start + count - (start + count) % CHUNK
            first = max(start, end) if batch.settles else start
            put(ring, first, own[first - start :])
            if batch.settles and end > base:
                state.conv[slot] = window[end - start : end - start + TAPS - 1]
            row += count
        return silu(found)

    # --- the rule ---

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        shape, rows = weights.shape, sum(segment.count for segment in batch.segments)
        heads, size = shape.key_heads, shape.key_size
        both = convolved[:rows, : 2 * shape.keys].reshape(rows, 2, heads, size)
        unit = torch.rms_norm(both, (size,), None, 1e-6 / size)  # but for a factor, which queries have once more
        asking = (unit * _factors(size)).permute(1, 2, 0, 3).contiguous()
        values = convolved[:rows, 2 * shape.keys :].reshape(rows, shape.value_heads, -1).transpose(0, 1)
        b, a = gates[:rows].float().T.contiguous().chunk(2)
        beta = by_vectors(torch.sigmoid, b)
        decays = by_vectors(torch.nn.functional.softplus, a + weights.dt_bias.unsqueeze(1)) * weights.rate.unsqueeze(1)
        out, row = convolved.new_zeros(len(convolved), shape.value_heads, shape.value_size), 0
        for segment in batch.segments:
            if segment.count == 1 and not batch.settles:
                own = DeltaRow(
                    asking[:, :, row].transpose(0, 1), values[:, row], beta[:, row : row + 1], decays[:, row : row + 1]
                )
                out[row] = read_row(self._row_buffers(shape), shape, state, segment.slot, segment.start, own)
                row += 1
                continue
            part = slice(row, row + segment.count)
            inputs = (asking[:, :, part], values[:, part], beta[:, part], decays[:, part])
            pieces = self._pieces(shape, state, segment, batch.settles, inputs)
            memory = state.memory[segment.slot]
            for piece in pieces:
                out[row : row + piece.count] = self._read(shape, memory, piece).transpose(0, 1)
                row += piece.count
                if piece.stop == CHUNK and (batch.settles or piece is not pieces[-1]):
                    memory = self._folded(shape, memory, piece.frame)
            if batch.settles:
                state.memory[segment.slot] = memory
        return out

    def _row_buffers(self, shape: DeltaShape) -> RowBuffers:
        found = self._buffers.get(shape)
        if found is None:
            found = self._buffers[shape] = RowBuffers.of(shape, self._counts(shape)[0])
        return found

    def _pieces(
        self,
        shape: DeltaShape,
        state: DeltaState,
        segment: Segment,
        settles: bool,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> list[Piece]:
        """What does not depend on the state, chunk by chunk; the inverses of all whole chunks at once."""
        asking, values, beta, decays = inputs
        stop, at, found = segment.start + segment.count, segment.start, list[Piece]()
        while at < stop:
            chunk, first = at // CHUNK, at % CHUNK
            count = min(CHUNK - first, stop - at)
            frame = ChunkRows.of(state, segment.slot, chunk)
            if settles and (chunk + 1) * CHUNK <= stop:  # its rows are of no use afterwards, and their room is needed
                frame = frame.beside(empty=not first)
            elif not first:
                frame.empty()
            rows = slice(at - segment.start, at - segment.start + count)
            own = (asking[:, :, rows], values[:, rows], beta[:, rows], decays[:, rows])
            found.append(self._piece(shape, frame, first, count, own))
            at += count
        whole = [piece for piece in found if piece.count == CHUNK]
        for piece in found:
            if piece.count < CHUNK:
                _invert([piece])
        if whole:
            _invert(whole)
        return found

    def _piece(
        self, shape: DeltaShape, frame: ChunkRows, first: int, count: int, own: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> Piece:
        both, values, beta, decays = own
        stop = first + count
        frame.keys[:, first:stop] = both[1]
        before = frame.decays[:, first - 1 : first] if first else decays.new_zeros(len(decays), 1)
        totals = torch.from_numpy(np.add.accumulate(torch.cat((before, decays), 1).numpy(), axis=1)[:, 1:].copy())
        frame.decays[:, first:stop] = totals
        asking = both.flip(0).transpose(0, 1).flatten(1, 2)  # [Nk, 2 count, dk]
        alike = shared(self._multiply(shape, asking, frame.keys.transpose(1, 2)), shape.group)
        faded = totals.unsqueeze(2) - frame.decays.unsqueeze(1)
        faded = by_vectors(torch.exp, faded.masked_fill_(_LATER[first:stop], float("-inf")))
        wide = beta.unsqueeze(2)
        return Piece(
            frame=frame,
            first=first,
            count=count,
            asking=shared(asking, shape.group),
            beta=wide,
            values=values,
            decay=by_vectors(torch.exp, totals).unsqueeze(2),
            own=alike[:, :count] * faded * wide,
            seen=alike[:, count:] * faded,
        )

    def _read(self, shape: DeltaShape, memory: Tensor, piece: Piece) -> Tensor:
        """`[Nv, count, dv]`; the rows' corrections are left in the frame."""
        frame, count = piece.frame, piece.count
        both = self._multiply(shape, piece.asking, memory)
        known, read = both[:, :count], both[:, count:]
        wanted = (piece.values - known * piece.decay) * piece.beta
        early = piece.own.masked_fill(_HERE[piece.first : piece.stop], 0.0)
        at = piece.first
        while at < piece.stop:
            block = slice(at - at % BLOCK, at - at % BLOCK + BLOCK)
            rows, own = slice(at, min(block.stop, piece.stop)), slice(at - piece.first, block.stop - piece.first)
            part = wanted[:, own]
            if block.start:
                part = part - self._multiply(shape, early[:, own], frame.deltas)
            frame.values[:, rows] = part
            frame.deltas[:, rows] = self._multiply(shape, frame.factors[:, rows], frame.values[:, block])
            at = rows.stop
        return read * piece.decay + self._multiply(shape, piece.seen, frame.deltas)

    def _folded(self, shape: DeltaShape, memory: Tensor, frame: ChunkRows) -> Tensor:
        """The state behind a whole chunk."""
        last = frame.decays[:, -1:]
        kept = by_vectors(torch.exp, torch.cat((last - frame.decays, last), 1))
        keys = (shared(frame.keys, shape.group) * kept[:, :CHUNK].unsqueeze(2)).transpose(1, 2).contiguous()
        return memory * kept[:, CHUNK:].unsqueeze(2) + self._multiply(shape, keys, frame.deltas)

    def fold(self, states: Sequence[DeltaState], slot: int, base: int) -> None:
        for state in states:
            memory = state.memory[slot]
            shape = DeltaShape(state.keys.shape[1], len(memory), memory.shape[1], memory.shape[2])
            memory.copy_(self._folded(shape, memory, ChunkRows.of(state, slot, base // CHUNK)))
            end = base % RING + CHUNK
            state.conv[slot] = state.inputs[slot, end - TAPS + 1 : end]

    def _multiply(self, shape: DeltaShape, x: Tensor, y: Tensor) -> Tensor:
        """`[heads, M, K]` times `[heads, K, N]`, with row counts that were proven."""
        counts, rows = self._counts(shape), x.shape[1]
        count = next((proven for proven in counts if proven >= rows), counts[-1])
        if rows == count:
            return torch.bmm(x, y)
        if rows < count:
            padded = x.new_zeros(len(x), count, x.shape[2])
            padded[:, :rows] = x
            return torch.bmm(padded, y)[:, :rows]
        return torch.cat([self._multiply(shape, part, y) for part in torch.split(x, count, 1)], 1)

    def _counts(self, shape: DeltaShape) -> tuple[int, ...]:
        if self._plan is None:
            return BATCHED
        served = self._plan.delta(shape)
        if served.way == NATIVE:
            raise Unproven(f"batched products of {shape}: what was proven is in C")
        return served.rows

    # --- gates ---

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = torch.rms_norm(x, weight.shape, weight, eps).flatten(1)
        return normed.mul_(silu(gate.float())).to(gate.dtype)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * by_vectors(torch.sigmoid, gate.float())).to(x.dtype)


@cache
def _factors(size: int) -> Tensor:
    """Of queries and keys whose squares are one in the mean: of length size ** -0.5, and 1."""
    return torch.tensor([[[1 / size]], [[size**-0.5]]])


def shared(x: Tensor, group: int) -> Tensor:
    """What key heads have, for the value heads that share them."""
    return x if group == 1 else x.repeat_interleave(group, 0)


def put(ring: Tensor, start: int, rows: Tensor) -> None:
    """Rows of positions from `start` on, at most as many as the ring has."""
    at = start % RING
    first = min(len(rows), RING - at)
    ring[at : at + first] = rows[:first]
    if first < len(rows):
        ring[: len(rows) - first] = rows[first:]


def _invert(pieces: Sequence[Piece]) -> None:
    """D of the pieces' rows, all of which are the same ones of their chunks: a row of every block at a time.

    D_i = e_i - sum_{j<i} A_ij D_j within the block. The terms are added in pairs, a fixed order whatever there is
    beside them; terms beyond the row are zero, so fewer do for the first rows.
    """
    first, stop = pieces[0].first, pieces[0].stop
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
