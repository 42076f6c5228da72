"""Launches of recurrent layers' kernels that work on single rows, and need no plan of chunks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import LaunchArguments
from adapters.models.kernels.interfaces.delta_interface import CHUNK, DeltaShape, DeltaState, DeltaWeights
from adapters.models.kernels.step_batch import StateBatch
from adapters.models.kernels.triton import delta_rows
from adapters.models.kernels.triton.hopper import hopper_single
from adapters.models.kernels.triton_launch import launch

AT_ONCE = 8  # heads of a program that works on single rows
# Of more single rows beside a prompt than this, programs have fewer registers than they would take, so that three of
# them run on one processor and not two.
FREE_ROWS = 4
ROW_REGISTERS = 168
READ_REGISTERS = 128  # of a thread that reads a row's tile of values: four programs run on one processor


class WideArguments(LaunchArguments):
    """The options of kernels that multiply whole chunks.

    INPUTS: pieces of bfloat16 that hold an input exactly. PARTS: pieces that are taken of a computed number.
    """

    INPUTS: int
    PARTS: int
    enable_fp_fusion: bool
    num_stages: int


def describe_heads(shape: DeltaShape) -> dict[str, int]:
    """Return the constants of kernels that say which heads there are."""
    return {"KEY_HEADS": shape.key_heads, "HEADS": shape.value_heads, "DK": shape.key_size, "DV": shape.value_size}


def limit_registers(rows: int) -> int | None:
    """Return the registers of a thread that works on one of so many single rows beside a prompt; None: there is no
    limit.
    """
    return ROW_REGISTERS if rows > FREE_ROWS else None


def read_single_rows(
    convolved: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    batch: StateBatch,
    tile: int,
    options: WideArguments,
) -> Tensor:
    """Return what the rows of a step read that has one row of each slot (`StateBatch.single`). tile: values of a head
    that one program computes.
    """
    shape = weights.shape
    rows = len(convolved)
    heads = shape.value_heads
    sizes = describe_heads(shape)
    scale = shape.key_size**-0.5
    mix = torch.empty(rows, heads, options["PARTS"], CHUNK, dtype=torch.bfloat16, device=convolved.device)
    lines = torch.empty(rows, heads, 2, CHUNK, device=convolved.device)
    out = torch.empty(rows, heads, shape.value_size, device=convolved.device)
    launch(
        hopper_single.factor_single_rows,
        (rows, heads),
        batch.slots,
        batch.positions,
        convolved,
        gates,
        state.keys,
        state.decays,
        weights.rate,
        weights.dt_bias,
        mix,
        lines,
        gates.stride(0),
        scale,
        **sizes,
        **options,
    )
    launch(
        hopper_single.read_single_rows,
        (rows, heads * (shape.value_size // tile)),
        batch.slots,
        batch.positions,
        convolved,
        state.keys,
        state.memory,
        mix,
        lines,
        out,
        scale,
        TILE=tile,
        maxnreg=READ_REGISTERS,
        **sizes,
        **options,
    )
    return out


def normalize_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, options: LaunchArguments) -> Tensor:
    """Return `DeltaKernels.gated_norm`."""
    rows, heads, size = x.shape
    out = torch.empty(rows, heads * size, dtype=gate.dtype, device=gate.device)
    launch(
        delta_rows.gated_norm,
        (rows, triton.cdiv(heads, AT_ONCE)),
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        HEADS=heads,
        DV=size,
        AT_ONCE=AT_ONCE,
        **options,
    )
    return out


def apply_gate(x: Tensor, gate: Tensor, options: LaunchArguments) -> Tensor:
    """Return `DeltaKernels.apply_gate`."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    launch(
        delta_rows.gate,
        (rows, triton.cdiv(width, 1024)),
        x,
        gate,
        out,
        x.stride(0),
        gate.stride(0),
        width,
        BLOCK=1024,
        **options,
    )
    return out
