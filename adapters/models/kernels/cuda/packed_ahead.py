"""Products of few rows with packed weights on Hopper: which weights and tiles they are for, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options, shared_layout
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper import hopper_packed, hopper_packed_beside, hopper_packed_wide
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

AHEAD_ROWS = 8  # rows of x of a tile, and the most whose weights come ahead
_STEPS = {"uint4", "int4", "int8", "e4m3"}  # those that were measured, and those of the same arithmetic
BESIDE_BYTES = 192 << 10  # of shared memory for rows of x and for blocks of weights that are unpacked beside products
WIDE_BYTES = 128 << 10  # of shared memory for rows of x in products of many rows
_WORDS = gl.NVMMASharedLayout(128, 32, 4)
_LEVELS = gl.NVMMASharedLayout(32, 32, 5)


@frozen
class AheadTile:
    """Rows of the weight that a program has, columns of a step, steps that shared memory holds, and warps. registers:
    the most of a thread.
    """

    outputs: int
    columns: int
    stages: int
    warps: int
    registers: int


FOUR_WARPS = AheadTile(64, 512, 2, 4, 128)
EIGHT_WARPS = AheadTile(128, 256, 3, 8, 80)


def comes_ahead(count: int, weight: CudaPackedMatrix, dtype: torch.dtype) -> bool:
    """Return whether products of so many rows are quicker in this way. With pieces they are not (decision 042)."""
    is_chain = weight.pieces == 1 and count <= AHEAD_ROWS
    return is_chain and dtype == torch.bfloat16 and weight.layout.steps in _STEPS


def choose_ahead_tile(weight: CudaPackedMatrix) -> AheadTile:
    """Choose the tile of such a product."""
    return EIGHT_WARPS if weight.layout.steps == "e4m3" else FOUR_WARPS


def multiply_ahead(x: Tensor, weight: CudaPackedMatrix, out: Tensor, *, gated: int, pdl: bool | None) -> None:
    tile = choose_ahead_tile(weight)
    pieces = weight.pieces
    planes = weight.levels.shape[2]
    height = tile.outputs // 8
    lines = 4 * tile.columns // weight.block_form.block
    words = weight.words.view(len(weight.words), pieces, -1, 32)
    levels = weight.levels.view(len(weight.levels), pieces, -1, planes, 8)
    descriptors: tuple[Any, ...] = (
        TensorDescriptor.from_tensor(words, [height, pieces, lines, 32], _WORDS),
        TensorDescriptor.from_tensor(
            levels, [height, pieces, tile.columns // 128, round_up_to_power(planes), 8], _LEVELS
        ),
        _describe_rows(x, pieces, tile.columns),
    )
    sizes = (len(x), weight.outputs, count_parts(words.shape[2], lines), out.stride(0))
    constants = {"W_STAGES": tile.stages, "X_STAGES": tile.stages, "FORM": weight.block_form, "GATED": gated}
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    grid = (count_parts(weight.outputs, tile.outputs), count_parts(len(x), AHEAD_ROWS))
    launch(hopper_packed.packed_ahead, grid, *descriptors, out, *sizes, **constants, **options)


def choose_wide_rows(count: int, *, in_pieces: bool) -> int:
    """Choose the rows of x of a tile. With pieces, a program has two sums of each element."""
    return 64 if count <= 64 else 128 if in_pieces or count <= 128 else 256


def multiply_wide_ahead(x: Tensor, weight: CudaPackedMatrix, out: Tensor, *, gated: int, pdl: bool | None) -> None:
    """Multiply many rows with a weight that is unpacked in registers."""
    form = weight.block_form
    in_pieces = weight.pieces > 1
    rows = choose_wide_rows(len(x), in_pieces=in_pieces)
    stages = WIDE_BYTES // (rows * form.block * x.element_size())
    grid = (count_parts(len(x), rows) * count_parts(weight.outputs, 128),)
    sizes = (len(x), weight.outputs, weight.blocks, weight.piece // form.block, out.stride(0))
    constants = {"STAGES": stages, "GROUP": 8, "FORM": form, "GATED": gated, "IN_PIECES": in_pieces}
    descriptor = describe_blocks(x, rows, form.block)
    options = launch_options(4, pdl)
    launch(hopper_packed_wide.packed_wide, grid, *weight.tensors, descriptor, out, *sizes, **constants, **options)


def is_unpacked_beside(count: int, weight: CudaPackedMatrix, dtype: torch.dtype) -> bool:
    """Return whether products of so many rows are quicker with a weight that is unpacked beside them."""
    return dtype != torch.float32


def multiply_beside(x: Tensor, weight: CudaPackedMatrix, out: Tensor, *, gated: int, pdl: bool | None) -> None:
    """Multiply many rows with a weight that is unpacked beside the products."""
    form = weight.block_form
    in_pieces = weight.pieces > 1
    rows = choose_wide_rows(len(x), in_pieces=in_pieces)
    stages = BESIDE_BYTES // ((128 + rows) * form.block * x.element_size())
    grid = (count_parts(len(x), rows) * count_parts(weight.outputs, 128),)
    sizes = (len(x), weight.outputs, weight.blocks, weight.piece // form.block, out.stride(0))
    constants = {"STAGES": stages, "GROUP": 8, "FORM": form, "GATED": gated, "IN_PIECES": in_pieces}
    options = launch_options(4, pdl)
    descriptor = describe_blocks(x, rows, form.block)
    launch(hopper_packed_beside.packed_beside, grid, *weight.tensors, descriptor, out, *sizes, **constants, **options)


def _describe_rows(x: Tensor, pieces: int, columns: int) -> TensorDescriptor:
    """Return a descriptor by which bulk copies bring some columns of every piece of rows of x."""
    block = (AHEAD_ROWS, pieces, columns)
    return TensorDescriptor.from_tensor(x.view(len(x), pieces, -1), [*block], shared_layout(block, x.dtype))
