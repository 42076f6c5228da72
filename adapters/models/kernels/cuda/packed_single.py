"""Products of one row with packed weights on Hopper: which weights and tiles they are for, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton import packed_single
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix


LARGEST_ROW = 64 << 10  # bytes of x in shared memory


@frozen
class SingleTile:
    """Rows of the weight that a program has, columns of the weight that each warp loads ahead, and warps. registers:
    the most of a thread.
    """

    outputs: int
    ahead: int
    warps: int
    registers: int | None


PIECES_TILES = {"few": SingleTile(16, 256, 8, 80), "many": SingleTile(16, 256, 8, 128)}
CHAIN_TILE: SingleTile | None = None


def choose_single_tile(weight: CudaPackedMatrix, dtype: torch.dtype) -> SingleTile | None:
    """Choose the tile of a product of one row. None: other products are for it."""
    if dtype.itemsize != 2 or weight.columns % 16 or weight.columns * 2 > LARGEST_ROW:
        return None
    if weight.pieces == 1:
        return CHAIN_TILE
    return PIECES_TILES["few" if weight.piece <= 512 else "many"]


def multiply_single(
    x: Tensor, weight: CudaPackedMatrix, out: Tensor, tile: SingleTile, *, gated: int, pdl: bool | None
) -> None:
    """Multiply one row with a packed weight."""
    form = weight.block_form
    each = weight.piece // form.block
    ahead = tile.ahead // form.block
    count = count_parts(each, ahead) * ahead
    constants = {
        "PIECES": weight.pieces,
        "BLOCK_N": tile.outputs,
        "AHEAD": ahead,
        "COUNT": count,
        "ROOM": round_up_to_power(count),
        "FORM": form,
        "GATED": gated,
    }
    sizes = (weight.outputs, weight.columns, weight.blocks, each)
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    grid = (count_parts(weight.outputs, tile.outputs),)
    launch(packed_single.packed_single, grid, *weight.tensors, x, out, *sizes, **constants, **options)
