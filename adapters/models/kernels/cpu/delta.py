"""The gated delta rule on a CPU by torch: batched products with proven row counts, whatever a step brings.

A row is computed in the frame of its chunk of 64 rows, from the state at the chunk's start and the rows before it
there. Sums are as wide as the chunk, and what a row must not see is zero in them. The factor T is applied in blocks
of 16 rows: the corrections of the blocks before are subtracted from u first, then the inverse D of the block itself
is applied. D does not depend on the state, so the inverses of all whole chunks are made together, one row of every
block at a time.

Outside of products only correctly rounded operations touch the rows, as everywhere on the CPU (`kernels.py`), and
functions that run on whole vectors (`apply_in_vectors`). Decays are added up one after the other.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from adapters.models.kernels.cpu.convolution_taps import TransposedTaps
from adapters.models.kernels.cpu.delta_chunks import HERE, LATER, ChunkPiece, ChunkRows, invert_blocks
from adapters.models.kernels.cpu.delta_row import DeltaRow, RowBuffers, read_row
from adapters.models.kernels.functions.vector_functions import apply_in_vectors, silu
from adapters.models.kernels.interfaces.delta_interface import (
    BLOCK,
    CHUNK,
    RING,
    TAPS,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    LayerStates,
    make_row_state,
)
from adapters.models.kernels.interfaces.product_list import BATCHED, NATIVE, ProductPlan, UnprovenProductError
from adapters.models.kernels.step import Segment
from adapters.models.kernels.step_batch import StateBatch


class CpuDelta:
    """Implements `DeltaKernels`. plan: the row counts that products run with; None: any count, and nothing is
    promised.
    """

    def __init__(self, plan: ProductPlan | None) -> None:
        self._plan = plan
        self._taps = TransposedTaps()
        self._buffers: dict[DeltaShape, RowBuffers] = {}

    commits_per_segment = False

    def make_state(
        self, shape: DeltaShape, slots: int, checkpoint_count: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaState:
        return make_row_state(shape, slots, checkpoint_count, dtype, device)

    # --- the convolution ---

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        taps = self._taps.taps_of(weights)
        found = mixed.new_zeros(mixed.shape, dtype=torch.float32)
        row = 0
        for segment, base in zip(batch.segments, batch.before, strict=True):
            slot = segment.slot
            start = segment.start
            count = segment.count
            ring = state.inputs[slot]
            own = mixed[row : row + count]
            at = base % RING
            held = start - base
            before = ring[at + max(0, held - TAPS + 1) : at + held]
            window = torch.cat((state.conv[slot], before, own))[-count - TAPS + 1 :]
            wide = window.float()
            total = found[row : row + count]
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
            write_ring(ring, first, own[first - start :])
            if batch.settles and end > base:
                state.conv[slot] = window[end - start : end - start + TAPS - 1]
            row += count
        return silu(found)

    # --- the rule ---

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        shape = weights.shape
        rows = sum(segment.count for segment in batch.segments)
        heads = shape.key_heads
        size = shape.key_size
        both = convolved[:rows, : 2 * shape.keys].reshape(rows, 2, heads, size)
        unit = torch.rms_norm(both, (size,), None, 1e-6 / size)  # but for a factor, which queries have once more
        asking = (unit * _length_factors(size)).permute(1, 2, 0, 3).contiguous()
        values = convolved[:rows, 2 * shape.keys :].reshape(rows, shape.value_heads, -1).transpose(0, 1)
        b, a = gates[:rows].float().T.contiguous().chunk(2)
        beta = apply_in_vectors(torch.sigmoid, b)
        decays = apply_in_vectors(
            torch.nn.functional.softplus, a + weights.dt_bias.unsqueeze(1)
        ) * weights.rate.unsqueeze(1)
        out = convolved.new_zeros(len(convolved), shape.value_heads, shape.value_size)
        row = 0
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
            pieces = self._cut_pieces(shape, state, segment, batch.settles, inputs)
            memory = state.memory[segment.slot]
            for piece in pieces:
                out[row : row + piece.count] = self._read_piece(shape, memory, piece).transpose(0, 1)
                row += piece.count
                if piece.stop == CHUNK and (batch.settles or piece is not pieces[-1]):
                    memory = self._next_state(shape, memory, piece.frame)
            if batch.settles:
                state.memory[segment.slot] = memory
        return out

    def _row_buffers(self, shape: DeltaShape) -> RowBuffers:
        found = self._buffers.get(shape)
        if found is None:
            found = self._buffers[shape] = RowBuffers.of(shape, self._proven_counts(shape)[0])
        return found

    def _cut_pieces(
        self,
        shape: DeltaShape,
        state: DeltaState,
        segment: Segment,
        settles: bool,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> list[ChunkPiece]:
        """Cut a segment at its chunks and compute what does not depend on the state. The inverses of all whole chunks
        are made together.
        """
        asking, values, beta, decays = inputs
        stop = segment.start + segment.count
        at = segment.start
        found = list[ChunkPiece]()
        while at < stop:
            chunk = at // CHUNK
            first = at % CHUNK
            count = min(CHUNK - first, stop - at)
            frame = ChunkRows.in_rings(state, segment.slot, chunk)
            if (
                settles and (chunk + 1) * CHUNK <= stop
            ):  # rows of a settled chunk are not read again, and their ring rows are needed
                frame = frame.copy_rows(empty=not first)
            elif not first:
                frame.clear()
            rows = slice(at - segment.start, at - segment.start + count)
            own = (asking[:, :, rows], values[:, rows], beta[:, rows], decays[:, rows])
            found.append(self._make_piece(shape, frame, first, count, own))
            at += count
        whole = [piece for piece in found if piece.count == CHUNK]
        for piece in found:
            if piece.count < CHUNK:
                invert_blocks([piece])
        if whole:
            invert_blocks(whole)
        return found

    def _make_piece(
        self, shape: DeltaShape, frame: ChunkRows, first: int, count: int, own: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> ChunkPiece:
        both, values, beta, decays = own
        stop = first + count
        frame.keys[:, first:stop] = both[1]
        before = frame.decays[:, first - 1 : first] if first else decays.new_zeros(len(decays), 1)
        totals = torch.from_numpy(np.add.accumulate(torch.cat((before, decays), 1).numpy(), axis=1)[:, 1:].copy())
        frame.decays[:, first:stop] = totals
        asking = both.flip(0).transpose(0, 1).flatten(1, 2)  # [Nk, 2 count, dk]
        alike = repeat_for_values(self._multiply(shape, asking, frame.keys.transpose(1, 2)), shape.group)
        faded = totals.unsqueeze(2) - frame.decays.unsqueeze(1)
        faded = apply_in_vectors(torch.exp, faded.masked_fill_(LATER[first:stop], float("-inf")))
        wide = beta.unsqueeze(2)
        return ChunkPiece(
            frame=frame,
            first=first,
            count=count,
            asking=repeat_for_values(asking, shape.group),
            beta=wide,
            values=values,
            decay=apply_in_vectors(torch.exp, totals).unsqueeze(2),
            own=alike[:, :count] * faded * wide,
            seen=alike[:, count:] * faded,
        )

    def _read_piece(self, shape: DeltaShape, memory: Tensor, piece: ChunkPiece) -> Tensor:
        """Return what a piece's rows read, `[Nv, count, dv]`; their corrections are left in the frame."""
        frame = piece.frame
        count = piece.count
        both = self._multiply(shape, piece.asking, memory)
        known = both[:, :count]
        read = both[:, count:]
        wanted = (piece.values - known * piece.decay) * piece.beta
        early = piece.own.masked_fill(HERE[piece.first : piece.stop], 0.0)
        at = piece.first
        while at < piece.stop:
            block = slice(at - at % BLOCK, at - at % BLOCK + BLOCK)
            rows = slice(at, min(block.stop, piece.stop))
            own = slice(at - piece.first, block.stop - piece.first)
            part = wanted[:, own]
            if block.start:
                part = part - self._multiply(shape, early[:, own], frame.deltas)
            frame.values[:, rows] = part
            frame.deltas[:, rows] = self._multiply(shape, frame.factors[:, rows], frame.values[:, block])
            at = rows.stop
        return read * piece.decay + self._multiply(shape, piece.seen, frame.deltas)

    def _next_state(self, shape: DeltaShape, memory: Tensor, frame: ChunkRows) -> Tensor:
        """Return the state behind a whole chunk."""
        last = frame.decays[:, -1:]
        kept = apply_in_vectors(torch.exp, torch.cat((last - frame.decays, last), 1))
        keys = (repeat_for_values(frame.keys, shape.group) * kept[:, :CHUNK].unsqueeze(2)).transpose(1, 2).contiguous()
        return memory * kept[:, CHUNK:].unsqueeze(2) + self._multiply(shape, keys, frame.deltas)

    def advance_state(self, states: LayerStates, slot: int, base: int) -> None:
        for state in states.layers:
            memory = state.memory[slot]
            shape = DeltaShape(state.keys.shape[1], len(memory), memory.shape[1], memory.shape[2])
            memory.copy_(self._next_state(shape, memory, ChunkRows.in_rings(state, slot, base // CHUNK)))
            end = base % RING + CHUNK
            state.conv[slot] = state.inputs[slot, end - TAPS + 1 : end]

    def _multiply(self, shape: DeltaShape, x: Tensor, y: Tensor) -> Tensor:
        """Multiply `[heads, M, K]` with `[heads, K, N]`, in row counts that were proven."""
        counts = self._proven_counts(shape)
        rows = x.shape[1]
        count = next((proven for proven in counts if proven >= rows), counts[-1])
        if rows == count:
            return torch.bmm(x, y)
        if rows < count:
            padded = x.new_zeros(len(x), count, x.shape[2])
            padded[:, :rows] = x
            return torch.bmm(padded, y)[:, :rows]
        return torch.cat([self._multiply(shape, part, y) for part in torch.split(x, count, 1)], 1)

    def _proven_counts(self, shape: DeltaShape) -> tuple[int, ...]:
        if self._plan is None:
            return BATCHED
        served = self._plan.find_delta(shape)
        if served.way == NATIVE:
            raise UnprovenProductError(f"batched products of {shape}: what was proven is in C")
        return served.rows

    # --- gates ---

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = torch.rms_norm(x, weight.shape, weight, eps).flatten(1)
        return normed.mul_(silu(gate.float())).to(gate.dtype)

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * apply_in_vectors(torch.sigmoid, gate.float())).to(x.dtype)


@cache
def _length_factors(size: int) -> Tensor:
    """Return factors that give queries the length size ** -0.5 and keys the length 1, where the mean of their squares
    is one.
    """
    return torch.tensor([[[1 / size]], [[size**-0.5]]])


def repeat_for_values(x: Tensor, group: int) -> Tensor:
    """Repeat what key heads have for the value heads that share them."""
    return x if group == 1 else x.repeat_interleave(group, 0)


def write_ring(ring: Tensor, start: int, rows: Tensor) -> None:
    """Write rows from position `start` on into a ring, at most as many as the ring has."""
    at = start % RING
    first = min(len(rows), RING - at)
    ring[at : at + first] = rows[:first]
    if first < len(rows):
        ring[: len(rows) - first] = rows[first:]
