"""The gated delta rule in plain torch, row by row as it is defined: slow, short, and the oracle of the fast kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from adapters.models.kernels.interfaces.delta_interface import (
    CHUNK,
    RING,
    TAPS,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    LayerStates,
    make_row_state,
)
from adapters.models.kernels.step_batch import StateBatch


def normalize(x: Tensor) -> Tensor:
    """Divide each row by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class ReferenceDelta:
    """Implements `DeltaKernels`. It keeps keys, corrections and decays of rows but no factors, and promises nothing
    about bits.
    """

    commits_per_segment = False

    def make_state(
        self, shape: DeltaShape, slots: int, checkpoint_count: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaState:
        return make_row_state(shape, slots, checkpoint_count, dtype, device)

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        found = mixed.new_zeros(mixed.shape, dtype=torch.float32)
        row = 0
        for segment, base in zip(batch.segments, batch.before, strict=True):
            slot = segment.slot
            start = segment.start
            stop = segment.start + segment.count
            before = torch.arange(base, start, device=mixed.device) % RING
            earlier = torch.cat((state.conv[slot], state.inputs[slot, before]))[1 - TAPS :]
            rows = slice(row, row + segment.count)
            window = torch.cat((earlier, mixed[rows]))  # from position start - 3 on
            taps = zip(window.unfold(0, segment.count, 1).unbind(0), weights.taps.T, strict=True)
            found[rows] = silu(sum(inputs.T.float() * tap for inputs, tap in taps))
            end = stop - stop % CHUNK
            first = max(start, end) if batch.settles else start
            state.inputs[slot, torch.arange(first, stop, device=mixed.device) % RING] = mixed[rows][first - start :]
            if batch.settles and end > base:
                state.conv[slot] = window[end - start : end - start + TAPS - 1]
            row += segment.count
        return found

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        shape = weights.shape
        q, k, v = torch.split(convolved, [shape.keys, shape.keys, shape.values], -1)
        q, k = (normalize(one.reshape(-1, shape.key_heads, shape.key_size)) for one in (q, k))
        q = q * shape.key_size**-0.5
        v = v.reshape(-1, shape.value_heads, shape.value_size)
        b, a = gates.float().chunk(2, -1)
        beta = b.sigmoid()
        g = weights.rate * softplus(a + weights.dt_bias)
        found = torch.zeros_like(v)
        row = 0
        for segment, base in zip(batch.segments, batch.before, strict=True):
            slot = segment.slot
            stop = segment.start + segment.count
            memory = state.memory[slot]
            total = torch.zeros_like(g[0])
            for position in range(base, stop):
                at = position % RING
                if position % CHUNK == 0:
                    total = torch.zeros_like(total)
                known = position < segment.start
                key = state.keys[slot, :, at].clone() if known else k[row]
                decay = state.decays[slot, :, at] - total if known else g[row]
                keys = key.repeat_interleave(shape.group, 0)
                memory = memory * decay.exp()[:, None, None]
                found_there = (memory * keys.unsqueeze(-1)).sum(1)
                delta = state.deltas[slot, :, at].clone() if known else beta[row].unsqueeze(-1) * (v[row] - found_there)
                memory = memory + keys.unsqueeze(-1) * delta.unsqueeze(1)
                total = total + decay
                if not known:
                    queries = q[row].repeat_interleave(shape.group, 0)
                    found[row] = (memory * queries.unsqueeze(-1)).sum(1)
                    state.keys[slot, :, at] = key
                    state.deltas[slot, :, at] = delta
                    state.decays[slot, :, at] = total
                    row += 1
                if batch.settles and (position + 1) % CHUNK == 0:
                    state.memory[slot] = memory
        return found

    def advance_state(self, states: LayerStates, slot: int, base: int) -> None:
        for state in states.layers:
            rows = slice(base % RING, base % RING + CHUNK)
            total = state.decays[slot, :, rows]
            weights = (total[:, -1:] - total).exp().unsqueeze(-1)
            group = len(total) // state.keys.shape[1]
            keys = state.keys[slot, :, rows].repeat_interleave(group, 0) * weights
            memory = state.memory[slot] * total[:, -1].exp()[:, None, None]
            state.memory[slot] = memory + keys.transpose(1, 2) @ state.deltas[slot, :, rows]
            state.conv[slot] = state.inputs[slot, rows][1 - TAPS :]

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        return (normed.flatten(1) * silu(gate.float())).to(gate.dtype)

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)
