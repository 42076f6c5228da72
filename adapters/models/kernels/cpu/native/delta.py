"""Recurrent layers by the compiled library: row after row, as the gated delta rule is defined, whatever a step brings.

What was done with the rows between a state and a step is done again, in the same operations, from what the rings have
of them. So a state is one chain over its sequence, and rows that are taken back have never been in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from adapters.models.kernels.cpu.convolution_taps import TapsByPlace
from adapters.models.kernels.cpu.native.library import NativeCode
from adapters.models.kernels.cpu.native.products import FORMS, WIDEST, check_lies
from adapters.models.kernels.delta_interface import (
    CHUNK,
    RING,
    TAPS,
    UNSETTLED,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    row_state,
)
from adapters.models.kernels.step_batch import StateBatch


def fits(shape: DeltaShape) -> bool:
    """Has the library room for such heads?"""
    return shape.key_size <= WIDEST


class NativeDelta:
    """level: as `NativeProducts` has it. The rings' `decays` are what is left of a state from one row to the next."""

    def __init__(self, compiled: NativeCode, level: int) -> None:
        self._code, self._level = compiled.code, level
        self._taps = TapsByPlace()

    def state(self, shape: DeltaShape, slots: int, places: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
        return row_state(shape, slots, places, dtype, device, factored=False)

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        """Queries and keys are divided by their length."""
        shape, rows, taps = weights.shape, len(mixed), self._taps.of(weights)
        _check(batch, len(state.inputs), rows)
        alike = mixed.dtype in FORMS and state.inputs.dtype is mixed.dtype and state.conv.dtype is mixed.dtype
        if not alike or mixed.stride(1) != 1 or mixed.shape[1] != shape.channels or not fits(shape):
            raise TypeError(f"a convolution of {mixed.dtype} {list(mixed.shape)} beside {state.inputs.dtype}, {shape}")
        slots = len(state.inputs)
        check_lies("taps", taps, (TAPS, shape.channels), torch.float32)
        check_lies("inputs before a state", state.conv, (len(state.conv), TAPS - 1, shape.channels), mixed.dtype)
        check_lies("inputs behind a state", state.inputs, (slots, RING, shape.channels), mixed.dtype)
        if len(state.conv) < slots:
            raise ValueError(f"{slots} slots, and inputs before the states of {len(state.conv)}")
        out = torch.empty(rows, shape.channels)
        self._code.rekindle_convolve(
            mixed.data_ptr(),
            mixed.stride(0),
            rows,
            shape.channels,
            shape.key_heads,
            shape.key_size,
            taps.data_ptr(),
            *_told(batch),
            state.conv.data_ptr(),
            state.inputs.data_ptr(),
            out.data_ptr(),
            FORMS[mixed.dtype],
            int(batch.settles),
            torch.get_num_threads(),
            self._level,
        )
        return out

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        shape, rows = weights.shape, len(convolved)
        heads = shape.value_heads
        _check(batch, len(state.keys), rows)
        if (
            convolved.dtype is not torch.float32
            or not convolved.is_contiguous()
            or convolved.shape[1] != shape.channels
        ):
            raise TypeError(f"rows of {convolved.dtype} {list(convolved.shape)} for {shape}")
        if gates.dtype not in FORMS or gates.stride(1) != 1 or gates.shape != (rows, 2 * heads) or not fits(shape):
            raise TypeError(f"gates of {gates.dtype} {list(gates.shape)} for {rows} rows of {shape}")
        for name, one in (("rates", weights.rate), ("biases of gates", weights.dt_bias)):
            check_lies(name, one, (heads,), torch.float32)
        _check_state(state, shape)
        room, out = torch.empty(rows, 2 * heads), torch.empty(rows, heads, shape.value_size)
        self._code.rekindle_delta(
            convolved.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            rows,
            *_sizes(shape),
            weights.rate.data_ptr(),
            weights.dt_bias.data_ptr(),
            *_told(batch),
            *_rings(state),
            room.data_ptr(),
            out.data_ptr(),
            FORMS[gates.dtype],
            int(batch.settles),
            torch.get_num_threads(),
            self._level,
        )
        return out

    def fold(self, states: Sequence[DeltaState], slot: int, base: int) -> None:
        for state in states:
            _, heads, size, width = state.memory.shape
            shape = DeltaShape(state.keys.shape[1], heads, size, width)
            _check_state(state, shape)
            if not 0 <= slot < len(state.keys) or base < 0 or base % CHUNK or not fits(shape):
                raise IndexError(f"slot {slot} of {len(state.keys)} with its state at {base}")
            self._code.rekindle_fold(slot, base, *_sizes(shape), *_rings(state), torch.get_num_threads(), self._level)
            end = base % RING + CHUNK
            state.conv[slot] = state.inputs[slot, end - TAPS + 1 : end]

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        check_lies("a norm's weight", weight, tuple(x.shape[2:]), torch.float32)
        if x.dtype is not torch.float32:
            raise TypeError(f"a norm of {x.dtype} {list(x.shape)}")
        return self._gated(x, gate, weight, eps)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dtype is not gate.dtype:
            raise TypeError(f"{x.dtype} with a gate in {gate.dtype}")
        return self._gated(x.unsqueeze(1), gate, None, 0.0)

    def _gated(self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        rows, heads, size = x.shape
        if gate.shape != (rows, heads * size) or gate.dtype not in FORMS or gate.stride(1) != 1:
            raise TypeError(f"a gate of {gate.dtype} {list(gate.shape)} for {list(x.shape)}")
        x, out = x.contiguous(), torch.empty(rows, heads * size, dtype=gate.dtype)
        self._code.rekindle_gated(
            x.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            rows,
            heads,
            size,
            None if weight is None else weight.data_ptr(),
            out.data_ptr(),
            FORMS[gate.dtype],
            eps,
            torch.get_num_threads(),
            self._level,
        )
        return out


def _check(batch: StateBatch, slots: int, rows: int) -> None:
    """Raises for rows that nothing goes on to: the library would read and write beside the rings."""
    if sum(segment.count for segment in batch.segments) > rows or batch.bucket != rows:
        raise ValueError(f"{rows} rows for a step of {batch.bucket}, {batch.segments}")
    for segment, base in zip(batch.segments, batch.before, strict=True):
        reaches = base % CHUNK == 0 and 0 <= base <= segment.start < base + CHUNK
        if not reaches or not 0 <= segment.slot < slots or (segment.count > UNSETTLED and not batch.settles):
            raise IndexError(f"{segment} from a state at {base}, in {slots} slots")


def _check_state(state: DeltaState, shape: DeltaShape) -> None:
    slots, heads = len(state.keys), shape.value_heads
    if len(state.memory) < slots or heads % shape.key_heads:
        raise ValueError(f"{slots} slots with {len(state.memory)} states of {shape}")
    tensors = {
        "memory": (state.memory, (len(state.memory), heads, shape.key_size, shape.value_size)),
        "keys": (state.keys, (slots, shape.key_heads, RING, shape.key_size)),
        "deltas": (state.deltas, (slots, heads, RING, shape.value_size)),
        "decays": (state.decays, (slots, heads, RING)),
    }
    for name, (tensor, lies) in tensors.items():
        check_lies(name, tensor, lies, torch.float32)


def _told(batch: StateBatch) -> tuple[object, ...]:
    """What the library is told of a step, in the order of its arguments."""
    count = len(batch.segments)
    counts = (segment.count for segment in batch.segments)
    firsts = (ctypes.c_long * (count + 1))(*accumulate(counts, initial=0))
    columns = (batch.slots, batch.positions, batch.bases, batch.counts)
    return *(column.data_ptr() for column in columns), firsts, count


def _sizes(shape: DeltaShape) -> tuple[int, int, int, int]:
    return shape.key_heads, shape.value_heads, shape.key_size, shape.value_size


def _rings(state: DeltaState) -> tuple[int, int, int, int]:
    return state.memory.data_ptr(), state.keys.data_ptr(), state.deltas.data_ptr(), state.decays.data_ptr()
