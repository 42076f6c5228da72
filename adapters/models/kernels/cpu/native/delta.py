"""Recurrent layers by the compiled library (delta.h): row after row, as the gated delta rule is defined.

The rows between a state and a step are computed again by the same operations, from what the rings keep of them. So a
state is one chain over its sequence, and rows that were taken back have never been in it.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from adapters.models.kernels.cpu.convolution_taps import TransposedTaps
from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, WIDEST, check_layout
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
from adapters.models.kernels.step import UNSETTLED
from adapters.models.kernels.step_batch import StateBatch


def has_room_for(shape: DeltaShape) -> bool:
    """Return whether the library has room for such heads."""
    return shape.key_size <= WIDEST


class NativeDelta:
    """Implements `DeltaKernels` at one level of instructions. The rings' `decays` are the factors e^g from one row to
    the next.
    """

    def __init__(self, compiled: NativeLibrary, level: int) -> None:
        self._code = compiled.code
        self._level = level
        self._taps = TransposedTaps()

    commits_per_segment = False

    def make_state(
        self, shape: DeltaShape, slots: int, checkpoint_count: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaState:
        return make_row_state(shape, slots, checkpoint_count, dtype, device, factored=False)

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        """Convolve as `DeltaKernels.convolve` says, and divide queries and keys by their length."""
        shape = weights.shape
        rows = len(mixed)
        taps = self._taps.taps_of(weights)
        _check_step(batch, len(state.inputs), rows)
        alike = mixed.dtype in DTYPE_CODES and state.inputs.dtype is mixed.dtype and state.conv.dtype is mixed.dtype
        if not alike or mixed.stride(1) != 1 or mixed.shape[1] != shape.channels or not has_room_for(shape):
            raise TypeError(f"a convolution of {mixed.dtype} {list(mixed.shape)} with {state.inputs.dtype}, {shape}")
        slots = len(state.inputs)
        check_layout("taps", taps, (TAPS, shape.channels), torch.float32)
        check_layout("inputs before a state", state.conv, (len(state.conv), TAPS - 1, shape.channels), mixed.dtype)
        check_layout("inputs behind a state", state.inputs, (slots, RING, shape.channels), mixed.dtype)
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
            *_step_arguments(batch),
            state.conv.data_ptr(),
            state.inputs.data_ptr(),
            out.data_ptr(),
            DTYPE_CODES[mixed.dtype],
            int(batch.settles),
            torch.get_num_threads(),
            self._level,
        )
        return out

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        shape = weights.shape
        rows = len(convolved)
        heads = shape.value_heads
        _check_step(batch, len(state.keys), rows)
        if (
            convolved.dtype is not torch.float32
            or not convolved.is_contiguous()
            or convolved.shape[1] != shape.channels
        ):
            raise TypeError(f"rows of {convolved.dtype} {list(convolved.shape)} for {shape}")
        if (
            gates.dtype not in DTYPE_CODES
            or gates.stride(1) != 1
            or gates.shape != (rows, 2 * heads)
            or not has_room_for(shape)
        ):
            raise TypeError(f"gates of {gates.dtype} {list(gates.shape)} for {rows} rows of {shape}")
        for name, one in (("rates", weights.rate), ("biases of gates", weights.dt_bias)):
            check_layout(name, one, (heads,), torch.float32)
        _check_state(state, shape)
        room = torch.empty(rows, 2 * heads)
        out = torch.empty(rows, heads, shape.value_size)
        self._code.rekindle_delta(
            convolved.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            rows,
            *_head_sizes(shape),
            weights.rate.data_ptr(),
            weights.dt_bias.data_ptr(),
            *_step_arguments(batch),
            *_ring_addresses(state),
            room.data_ptr(),
            out.data_ptr(),
            DTYPE_CODES[gates.dtype],
            int(batch.settles),
            torch.get_num_threads(),
            self._level,
        )
        return out

    def advance_state(self, states: LayerStates, slot: int, base: int) -> None:
        for state in states.layers:
            _, heads, size, width = state.memory.shape
            shape = DeltaShape(state.keys.shape[1], heads, size, width)
            _check_state(state, shape)
            if not 0 <= slot < len(state.keys) or base < 0 or base % CHUNK or not has_room_for(shape):
                raise IndexError(f"slot {slot} of {len(state.keys)} with its state at {base}")
            self._code.rekindle_fold(
                slot, base, *_head_sizes(shape), *_ring_addresses(state), torch.get_num_threads(), self._level
            )
            end = base % RING + CHUNK
            state.conv[slot] = state.inputs[slot, end - TAPS + 1 : end]

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        check_layout("a norm's weight", weight, tuple(x.shape[2:]), torch.float32)
        if x.dtype is not torch.float32:
            raise TypeError(f"a norm of {x.dtype} {list(x.shape)}")
        return self._apply_gate(x, gate, weight, eps)

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dtype is not gate.dtype:
            raise TypeError(f"{x.dtype} with a gate in {gate.dtype}")
        return self._apply_gate(x.unsqueeze(1), gate, None, 0.0)

    def _apply_gate(self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        rows, heads, size = x.shape
        if gate.shape != (rows, heads * size) or gate.dtype not in DTYPE_CODES or gate.stride(1) != 1:
            raise TypeError(f"a gate of {gate.dtype} {list(gate.shape)} for {list(x.shape)}")
        x = x.contiguous()
        out = torch.empty(rows, heads * size, dtype=gate.dtype)
        self._code.rekindle_gated(
            x.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            rows,
            heads,
            size,
            None if weight is None else weight.data_ptr(),
            out.data_ptr(),
            DTYPE_CODES[gate.dtype],
            eps,
            torch.get_num_threads(),
            self._level,
        )
        return out


def _check_step(batch: StateBatch, slots: int, rows: int) -> None:
    """Raise for a step that does not continue its states: the library would read and write outside the rings."""
    if sum(segment.count for segment in batch.segments) > rows or batch.bucket != rows:
        raise ValueError(f"{rows} rows for a step of {batch.bucket}, {batch.segments}")
    for segment, base in zip(batch.segments, batch.before, strict=True):
        reaches = base % CHUNK == 0 and 0 <= base <= segment.start < base + CHUNK
        if not reaches or not 0 <= segment.slot < slots or (segment.count > UNSETTLED and not batch.settles):
            raise IndexError(f"{segment} from a state at {base}, in {slots} slots")


def _check_state(state: DeltaState, shape: DeltaShape) -> None:
    slots = len(state.keys)
    heads = shape.value_heads
    if len(state.memory) < slots or heads % shape.key_heads:
        raise ValueError(f"{slots} slots with {len(state.memory)} states of {shape}")
    tensors = {
        "memory": (state.memory, (len(state.memory), heads, shape.key_size, shape.value_size)),
        "keys": (state.keys, (slots, shape.key_heads, RING, shape.key_size)),
        "deltas": (state.deltas, (slots, heads, RING, shape.value_size)),
        "decays": (state.decays, (slots, heads, RING)),
    }
    for name, (tensor, lies) in tensors.items():
        check_layout(name, tensor, lies, torch.float32)


def _step_arguments(batch: StateBatch) -> tuple[object, ...]:
    """Return the library's arguments that describe a step, in their order."""
    count = len(batch.segments)
    counts = (segment.count for segment in batch.segments)
    firsts = (ctypes.c_long * (count + 1))(*accumulate(counts, initial=0))
    columns = (batch.slots, batch.positions, batch.bases, batch.counts)
    return *(column.data_ptr() for column in columns), firsts, count


def _head_sizes(shape: DeltaShape) -> tuple[int, int, int, int]:
    return shape.key_heads, shape.value_heads, shape.key_size, shape.value_size


def _ring_addresses(state: DeltaState) -> tuple[int, int, int, int]:
    return state.memory.data_ptr(), state.keys.data_ptr(), state.deltas.data_ptr(), state.decays.data_ptr()
