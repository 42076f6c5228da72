"""Products of 5 to 64 rows with packed weights on Hopper, with a program for each piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options
from adapters.models.kernels.cuda.packing.many_rows import divide_piece
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper import hopper_packed_parts
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

_TALL = 64  # rows of the weight of a program with one piece
_FEWEST_ROWS = 16  # of x of a tile of such a program
_FEW_ROWS = 32
LEAST_PART_ROWS = 5  # that are multiplied so
MOST_PART_ROWS = 64
_PART_STEPS = {"uint4", "e4m3"}
_PART_COLUMNS = 256  # that such a program loads ahead


@frozen(eq=False)
class PartScratch:
    """The sums of pieces that programs of one product share, and for each of its tiles how many have been written.

    sums: float32. left: int32, zeros between two products.
    """

    sums: Tensor
    left: Tensor

    @classmethod
    def allocate(cls, outputs: int, pieces: int, device: torch.device) -> PartScratch:
        """Allocate what products with weights of fewer outputs need."""
        tiles = count_parts(outputs, _TALL)
        sums = torch.empty(tiles * pieces * _TALL * MOST_PART_ROWS, dtype=torch.float32, device=device)
        return cls(sums, torch.zeros(tiles, dtype=torch.int32, device=device))


@frozen
class PartTile:
    """Blocks of packed words that a program loads ahead, blocks of x in shared memory, and registers of a thread."""

    ahead: int
    stages: int
    registers: int


def has_parts(count: int, weight: CudaPackedMatrix, dtype: torch.dtype) -> bool:
    """Return whether products of so many rows are quicker with a program for each piece. Only formats that were
    measured have them, and pieces of which a program loads several blocks ahead.
    """
    is_even = divide_piece(weight, 2) > 1
    is_measured = dtype == torch.bfloat16 and weight.layout.steps in _PART_STEPS and is_even
    return is_measured and LEAST_PART_ROWS <= count <= MOST_PART_ROWS


def choose_part_tile(count: int, weight: CudaPackedMatrix) -> PartTile:
    """Choose the tile of such a product. Few rows in pieces have many short programs, of which a processor has more at
    a time if each has fewer registers.
    """
    block = weight.block_form.block
    if count > _FEW_ROWS:
        return PartTile(divide_piece(weight, _PART_COLUMNS // block), 4, 168)
    if weight.pieces == 1:
        return PartTile(divide_piece(weight, 4), 4, 168)
    return PartTile(divide_piece(weight, _PART_COLUMNS // block), 3, 128)


def multiply_parts(
    x: Tensor, weight: CudaPackedMatrix, out: Tensor, scratch: PartScratch, *, gated: int, pdl: bool | None
) -> None:
    """Multiply up to 64 rows, each piece in programs of its own."""
    form = weight.block_form
    assert weight.pieces == 1 or count_parts(weight.outputs, _TALL) <= len(scratch.left)
    tile = choose_part_tile(len(x), weight)
    rows = max(_FEWEST_ROWS, round_up_to_power(len(x)))
    grid = (count_parts(weight.outputs, _TALL) * weight.pieces, 1)
    sizes = (len(x), weight.outputs, weight.blocks, weight.piece // form.block, out.stride(0))
    constants = {
        "PIECES": weight.pieces,
        "AHEAD": tile.ahead,
        "STAGES": tile.stages,
        "FORM": form,
        "GATED": gated,
    }
    given = (describe_blocks(x, rows, form.block), out, scratch.sums, scratch.left)
    options = launch_options(4, pdl) | {"maxnreg": tile.registers}
    launch(hopper_packed_parts.packed_parts, grid, *weight.tensors, *given, *sizes, **constants, **options)
