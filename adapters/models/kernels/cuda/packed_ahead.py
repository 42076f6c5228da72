"""Products of few rows with packed weights on Hopper: which weights and tiles they are for, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import launch_options, shared_layout
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper import hopper_packed
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

AHEAD_ROWS = 16  # rows of x whose weights come ahead
_WORDS = gl.NVMMASharedLayout(128, 32, 4)
_LEVELS = gl.NVMMASharedLayout(32, 32, 5)


@frozen
class AheadTile:
    """Rows of x and of the weight that a program has, columns of every piece that a step has, and steps of the weight
    and of x that shared memory holds.
    """

    rows: int
    outputs: int
    columns: int
    stages: int
    x_stages: int = 2
    warps: int = 8
    registers: int = 80


def can_come_ahead(weight: CudaPackedMatrix) -> bool:
    """Return whether all pieces of a weight are equally long, so that one bulk copy brings a block of each."""
    return weight.pieces == 1 or weight.columns == weight.pieces * weight.piece


def choose_ahead_tile(count: int, weight: CudaPackedMatrix) -> AheadTile:
    """Choose the tile of a product of this many rows."""
    rows = 8 if count <= 8 else 16
    if weight.pieces == 1:
        return AheadTile(rows, 64, 256, 4, 4, warps=4, registers=128)
    return AheadTile(rows, 16, 128, 4)


def multiply_ahead(
    x: Tensor, weight: CudaPackedMatrix, out: Tensor, tile: AheadTile, *, gated: bool, pdl: bool | None
) -> None:
    pieces = weight.pieces
    blocks = tile.columns // weight.block_form.block
    planes = weight.levels.shape[2]
    words = weight.words.view(len(weight.words), pieces, -1, 32)
    levels = weight.levels.view(len(weight.levels), pieces, -1, planes, 8)
    high = tile.outputs // 8
    descriptors: tuple[Any, ...] = (
        TensorDescriptor.from_tensor(words, [high, pieces, 4 * blocks, 32], _WORDS),
        TensorDescriptor.from_tensor(
            levels, [high, pieces, tile.columns // 128, round_up_to_power(planes), 8], _LEVELS
        ),
        describe_pieces(x, pieces, tile.rows, tile.columns),
    )
    grid = (count_parts(weight.outputs, tile.outputs), count_parts(len(x), tile.rows))
    steps = count_parts(words.shape[2], 4 * blocks)
    sizes = (len(x), weight.outputs, steps, out.stride(0))
    constants = {
        "W_STAGES": tile.stages,
        "X_STAGES": tile.x_stages,
        "FORM": weight.block_form,
        "GATED": gated,
    }
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    launch(hopper_packed.packed_ahead, grid, *descriptors, out, *sizes, **constants, **options)


def describe_pieces(x: Tensor, pieces: int, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor by which bulk copies bring some columns of every piece of some rows."""
    block = (rows, pieces, columns)
    return TensorDescriptor.from_tensor(x.view(len(x), pieces, -1), [*block], shared_layout(block, x.dtype))
