"""The experts of one row on Hopper, with weights in MXFP4: a product with its gate, and one behind it.

`triton/hopper/hopper_row_experts.py` says what differs from the products of several rows. Bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.kernels.activations import GATES
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.packed import PIECES, CudaPackedMatrix, find_only_part
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.interfaces.experts_interface import GatedWeights
from adapters.models.kernels.triton.hopper.hopper_row_experts import ROWS, multiply_row
from adapters.models.kernels.triton_launch import launch

_WARPS = 8
_REGISTERS = 128  # of a thread, so that a processor has two programs at a time
_RESIDENT = 2
_MOST_BLOCKS = 3  # of a piece: the row of x has to fit into registers
_WORD_BYTES = PIECES * ROWS.value * 64  # of shared memory, for the words of a block of every piece in a unit
_SCALE_BYTES = PIECES * ROWS.value * 4
_OWN_BYTES = 8 << 10  # of shared memory, for sums of pieces, and what a program has anyway
_MOST_STAGES = 4


def fits_one_row(weights: GatedWeights, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for one row: of weights in MXFP4 with biases and a gate that no product has."""
    parts = (find_only_part(weights.gate_up), find_only_part(weights.down))
    return (
        dtype == torch.bfloat16
        and weights.gate_up_bias is not None
        and not weights.gate_up.gated
        and all(part is not None and _can_be_multiplied(part) for part in parts)
    )


def _can_be_multiplied(weight: CudaPackedMatrix) -> bool:
    is_even = weight.outputs % ROWS.value == 0
    blocks = weight.piece // weight.block_form.block
    return weight.layout.steps == "e2m1" and weight.pieces == PIECES and is_even and blocks <= _MOST_BLOCKS


def multiply_experts_of_row(
    x: Tensor, weights: GatedWeights, chosen: Tensor, out: Tensor, device: tuple[int, int, bool | None]
) -> None:
    """Write what the experts of one row make of it, `[k, D]`, the most wanted first. chosen: int32 `[1, k]`.

    device: its processors, bytes of shared memory of one of them, and `pdl` of `launch_options`.
    """
    gate, down = find_only_part(weights.gate_up), find_only_part(weights.down)
    assert gate is not None
    assert down is not None
    assert weights.gate_up_bias is not None
    inner = x.new_empty(chosen.numel(), gate.outputs // 2)
    _multiply(x, gate, weights.gate_up_bias, inner, chosen, GATES[weights.activation], device)
    _multiply(inner, down, out, out, chosen, 0, device)  # a bias is added with the sum over experts


def _multiply(
    x: Tensor,
    weight: CudaPackedMatrix,
    bias: Tensor,
    out: Tensor,
    chosen: Tensor,
    gate: int,
    device: tuple[int, int, bool | None],
) -> None:
    processors, shared, pdl = device
    each = weight.piece // weight.block_form.block
    room = (shared // _RESIDENT - _OWN_BYTES) // (each * _WORD_BYTES + round_up_to_power(each) * _SCALE_BYTES)
    tiles = chosen.numel()
    units = tiles * weight.outputs // ROWS.value
    launch(
        multiply_row,
        (_RESIDENT * min(processors, count_parts(units, _RESIDENT)),),
        *weight.tensors,
        x,
        bias,
        chosen,
        out,
        *(one.stride(0) for one in weight.tensors),
        weight.outputs,
        weight.columns,
        TILES=tiles,
        EXPERTS=len(weight.words),
        PIECES=weight.pieces,
        BLOCKS=weight.blocks,
        EACH=each,
        STAGES=max(1, min(_MOST_STAGES, room)),
        RESIDENT=_RESIDENT,
        FORM=weight.block_form,
        GATE=gate,
        EARLY=not gate,
        **launch_options(_WARPS, pdl) | {"maxnreg": _REGISTERS},
    )
