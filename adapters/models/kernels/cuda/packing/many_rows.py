"""Products of many rows with packed weights on Hopper, unpacked in registers where that is quicker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options
from adapters.models.kernels.cuda.tiles import count_parts
from adapters.models.kernels.triton.hopper import hopper_packed_wide
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

_WIDE_BYTES = 192 << 10  # of shared memory for rows of x in products of many rows
_ALL = 1 << 16  # rows, more than any step has
# The most rows that are unpacked in registers, of a chain, of pieces of up to _WIDE_COLUMNS, and of longer ones
# (decision 071). E4M3 takes more instructions.
_WIDE_COLUMNS = 4096
_WIDE_ROWS = {"uint4": (_ALL, _ALL, _ALL), "e4m3": (2048, 512, 0)}
_WIDE_OUTPUTS = 128  # rows of the weight of a tile


def multiply_wide(
    x: Tensor, weight: CudaPackedMatrix, out: Tensor, processors: int, *, gated: int, pdl: bool | None
) -> bool:
    """Multiply many rows, more than `NARROW_PACKED`, if that is quicker than to unpack the weight to memory first.
    Return whether it is. processors: of the device.
    """
    is_quicker = is_unpacked_in_registers(len(x), weight, x.dtype)
    if is_quicker:
        multiply_wide_ahead(x, weight, out, processors, gated=gated, pdl=pdl)
    return is_quicker


def is_unpacked_in_registers(count: int, weight: CudaPackedMatrix, dtype: torch.dtype) -> bool:
    """Return whether products of so many rows are quicker with a weight that is unpacked in registers than with one
    that has been unpacked to memory. Only formats that were measured are.
    """
    most = _WIDE_ROWS.get(weight.layout.steps, (0, 0, 0))
    place = 0 if weight.pieces == 1 else 1 if weight.columns <= _WIDE_COLUMNS else 2
    return dtype == torch.bfloat16 and count <= most[place]


def choose_wide_rows(count: int, weight: CudaPackedMatrix, processors: int) -> int:
    """Choose the rows of x of a tile. With pieces a program has two sums of each element, so its tile is smaller."""
    if weight.pieces == 1:
        return 128 if count <= 256 else 256
    return 64 if count_parts(count, 64) * count_parts(weight.outputs, _WIDE_OUTPUTS) <= processors else 128


def multiply_wide_ahead(
    x: Tensor, weight: CudaPackedMatrix, out: Tensor, processors: int, *, gated: int, pdl: bool | None
) -> None:
    """Multiply many rows with a weight that is unpacked in registers. processors: of the device."""
    form = weight.block_form
    rows = choose_wide_rows(len(x), weight, processors)
    tiles = count_parts(len(x), rows) * count_parts(weight.outputs, _WIDE_OUTPUTS)
    grid = (min(tiles, processors),)
    sizes = (len(x), weight.outputs, weight.blocks, weight.piece // form.block, out.stride(0))
    constants = {
        "STAGES": _WIDE_BYTES // (rows * form.block * x.element_size()),
        "GROUP": 8,
        "FORM": form,
        "GATED": gated,
        "IN_PIECES": weight.pieces > 1,
        "PARTS": divide_piece(weight, 4),
    }
    descriptor = describe_blocks(x, rows, form.block)
    options = launch_options(4, pdl)
    launch(hopper_packed_wide.packed_wide, grid, *weight.tensors, descriptor, out, *sizes, **constants, **options)


def divide_piece(weight: CudaPackedMatrix, most: int) -> int:
    """Return the greatest number of blocks, up to `most`, of which a piece is a multiple."""
    each = weight.piece // weight.block_form.block
    return next(parts for parts in range(most, 0, -1) if each % parts == 0)
