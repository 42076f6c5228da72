"""Products with packed weights in kernels of Hopper: which weights and tiles they are for, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options, shared_layout
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper import (
    hopper_packed,
    hopper_packed_parts,
    hopper_packed_row,
    hopper_packed_wide,
    hopper_row_registers,
)
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

AHEAD_ROWS = 8  # rows of x of a tile, and the most whose weights come ahead
_STEPS = {"uint4", "int4", "int8", "e4m3"}  # those that were measured, and those of the same arithmetic
_WIDE_BYTES = 192 << 10  # of shared memory for rows of x in products of many rows
_ALL = 1 << 16  # rows, more than any step has
# The most rows that are unpacked in registers, of a chain, of pieces of up to _WIDE_COLUMNS, and of longer ones
# (decision 071). Formats whose words have scales of their own take more instructions, and E4M3 the most.
_WIDE_COLUMNS = 4096
_WIDE_ROWS = {"uint4": (_ALL, _ALL, _ALL), "scale of word": (_ALL, 2048, 1024), "e4m3": (2048, 512, 0)}
_TALL = 64  # rows of the weight of a program with one piece
_FEWEST_ROWS = 16  # of x of a tile of such a program
_FEW_ROWS = 32
LEAST_PART_ROWS = 5  # that are multiplied so
MOST_PART_ROWS = 64
_PART_STEPS = {"uint4", "e4m3"}
_PART_COLUMNS = 256  # that such a program loads ahead
_WIDE_OUTPUTS = 128  # rows of the weight of a tile
_MOST_PROGRAMS = 3  # of one row, that a processor has at a time
_RESERVED = 1 << 10  # bytes of shared memory that each program takes in addition to its own
_BARRIERS = 1 << 10  # bytes of barriers, at most
_SCALES = 16  # bytes of the scales of the four words of a row of a block
_WORDS = gl.NVMMASharedLayout(128, 32, 4)
_LEVELS = gl.NVMMASharedLayout(32, 32, 5)


@frozen
class AheadTile:
    """Rows of the weight that a program has, columns of a step, steps that shared memory holds, and warps.

    stages: 0: words of one step wait in registers instead, of products of one row. registers: the most of a thread.
    """

    outputs: int
    columns: int
    stages: int
    warps: int
    registers: int


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
    descriptors = (*_describe_weight(weight, tile, weight.pieces), _describe_rows(x, weight.pieces, tile.columns))
    steps = count_parts(weight.blocks // weight.pieces, tile.columns // weight.block_form.block)
    sizes = (len(x), weight.outputs, steps, out.stride(0))
    constants = {"W_STAGES": tile.stages, "X_STAGES": tile.stages, "FORM": weight.block_form, "GATED": gated}
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    grid = (count_parts(weight.outputs, tile.outputs), count_parts(len(x), AHEAD_ROWS))
    launch(hopper_packed.packed_ahead, grid, *descriptors, out, *sizes, **constants, **options)


# Of one row, for each kind of steps (decisions 057, 058 and 064); `fill_memory` may find room for more stages.
ROW_CHAINS = {
    "e4m3": AheadTile(64, 128, 2, 4, 128),
    "int8": AheadTile(64, 256, 2, 4, 168),
    "uint4": AheadTile(64, 512, 2, 4, 168),
}
ROW_PIECES = AheadTile(16, 128, 2, 8, 80)
LONG_PIECES = {"int8": AheadTile(16, 256, 2, 8, 168)}
MANY_PIECES = {"e4m3": AheadTile(16, 256, 2, 8, 80)}  # of weights for which a processor has three programs at a time
_LONG = 1024  # columns of a long piece
_SHORT = 512  # columns of a short piece
_ROUNDS = {"uint4": 2}  # of programs with a chain for each of several rows, at most


def choose_row_tile(x: Tensor, weight: CudaPackedMatrix, processors: int, shared: int) -> AheadTile | None:
    """Choose the tile of a product of one row. None: other products are for it. shared: see `CudaPacking`.

    Only formats for which it was quicker have one.
    """
    layout = weight.layout
    is_quicker = layout.group >= 32 if layout.steps == "uint4" else layout.per == 1 and not layout.least
    if len(x) != 1 or x.dtype != torch.bfloat16 or layout.steps not in ROW_CHAINS or not is_quicker:
        return None
    tile = _choose_chain(weight, processors) if weight.pieces == 1 else _choose_pieces(weight, processors)
    if tile is None or weight.columns != weight.pieces * weight.piece or weight.piece % tile.columns:
        return None
    if tile.stages == 0:
        programs = 2 if tile.registers > ROW_PIECES.registers else _MOST_PROGRAMS
        fits = programs * (count_whole_bytes(tile, weight) + _RESERVED) <= shared + _RESERVED
        return tile if fits else None
    found = fill_memory(tile, weight, processors, shared)
    if found is None and weight.block_form.has_scale_of_word:
        found = fill_memory(evolve(tile, columns=tile.columns // 2), weight, processors, shared)
    return found


def count_whole_bytes(tile: AheadTile, weight: CudaPackedMatrix) -> int:
    """Return the bytes of what a program of one row has whole in shared memory: the row, and scales that are made
    before it comes.
    """
    made = tile.outputs * (weight.columns // 128) * _SCALES if weight.block_form.has_scale_of_word else 0
    return 2 * weight.columns + made


def _choose_chain(weight: CudaPackedMatrix, processors: int) -> AheadTile | None:
    """None: there are more rounds of programs, which keep memory busy by themselves."""
    steps = weight.layout.steps
    tile = ROW_CHAINS[steps]
    programs = count_parts(weight.outputs, tile.outputs)
    return tile if programs <= _ROUNDS.get(steps, 1) * _MOST_PROGRAMS * processors else None


def _choose_pieces(weight: CudaPackedMatrix, processors: int) -> AheadTile:
    """Words of four bits wait in registers. With 80 of them, three programs run at a time instead of two. Of pieces of
    few blocks, memory has room for all words of a program.
    """
    steps = weight.layout.steps
    rows = ROW_PIECES.outputs
    is_many = count_parts(weight.outputs, rows) > 2 * processors
    if steps != "uint4":
        found = LONG_PIECES if weight.piece >= _LONG else MANY_PIECES if is_many else {}
        return found.get(steps, ROW_PIECES)
    if not is_many:
        return AheadTile(rows, 512 if weight.piece == 512 else 256, 0, 8, 128)
    if weight.piece <= _SHORT:
        return AheadTile(rows, 256, 0, 8, 80)
    return ROW_PIECES if weight.piece < _LONG else AheadTile(rows, 128, 0, 8, 80)


def fill_memory(tile: AheadTile, weight: CudaPackedMatrix, processors: int, shared: int) -> AheadTile | None:
    """Return the tile with as many stages as fit into memory together with a row of x. None: fewer fit than it has.

    A processor has as many programs at a time as it takes to have all of them at once.
    """
    programs = min(_MOST_PROGRAMS, count_parts(count_parts(weight.outputs, tile.outputs), processors))
    columns = weight.pieces * tile.columns
    words = 4 * columns // weight.block_form.block * 128
    levels = columns // 128 * round_up_to_power(weight.levels.shape[2]) * 32
    stage = tile.outputs // 8 * (words if weight.block_form.has_scale_of_word else words + levels)
    room = (shared + _RESERVED) // programs - _RESERVED - _BARRIERS - count_whole_bytes(tile, weight)
    stages = room // stage
    steps = weight.piece // tile.columns
    return evolve(tile, stages=min(steps, stages)) if stages >= tile.stages else None


def multiply_row(
    x: Tensor,
    weight: CudaPackedMatrix,
    out: Tensor,
    tile: AheadTile,
    *,
    gated: int,
    pdl: bool | None,
    is_late: bool = False,
) -> None:
    """Multiply one row. The columns of a piece are whole steps of the tile.

    is_late: the next kernel may run at the same time. There must be stages.
    """
    form = weight.block_form
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers, "FORM": form, "GATED": gated}
    grid = (count_parts(weight.outputs, tile.outputs),)
    if tile.stages > 0:
        sizes = {"STEPS": weight.piece // tile.columns, "COLUMNS": tile.columns, "STAGES": tile.stages}
        described = _describe_weight(weight, tile, weight.pieces)
        whole = (weight.levels, x, out, weight.outputs)
        launch(hopper_packed_row.packed_row, grid, *described, *whole, LATE=is_late, **sizes, **options)
        return
    sizes = {"EACH": weight.piece // form.block, "AHEAD": tile.columns // form.block}
    sizes |= {"PIECES": weight.pieces, "BLOCK_N": tile.outputs}
    given = (x, out, weight.outputs, weight.blocks)
    launch(hopper_row_registers.packed_row_registers, grid, *weight.tensors, *given, **sizes, **options)


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
    kind = "scale of word" if weight.block_form.has_scale_of_word else weight.layout.steps
    most = _WIDE_ROWS.get(kind, (0, 0, 0))
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
    grid = (count_parts(len(x), rows) * count_parts(weight.outputs, _WIDE_OUTPUTS),)
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


def divide_piece(weight: CudaPackedMatrix, most: int) -> int:
    """Return the greatest number of blocks, up to `most`, of which a piece is a multiple."""
    each = weight.piece // weight.block_form.block
    return next(parts for parts in range(most, 0, -1) if each % parts == 0)


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


def _describe_weight(
    weight: CudaPackedMatrix, tile: AheadTile, pieces: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return descriptors by which bulk copies bring words and levels of some columns of every piece."""
    planes = weight.levels.shape[2]
    height = tile.outputs // 8
    lines = 4 * tile.columns // weight.block_form.block
    words = weight.words.view(len(weight.words), pieces, -1, 32)
    levels = weight.levels.view(len(weight.levels), pieces, -1, planes, 8)
    records = [height, pieces, tile.columns // 128, round_up_to_power(planes), 8]
    return (
        TensorDescriptor.from_tensor(words, [height, pieces, lines, 32], _WORDS),
        TensorDescriptor.from_tensor(levels, records, _LEVELS),
    )


def _describe_rows(x: Tensor, pieces: int, columns: int) -> TensorDescriptor:
    """Return a descriptor by which bulk copies bring some columns of every piece of rows of x."""
    block = (AHEAD_ROWS, pieces, columns)
    return TensorDescriptor.from_tensor(x.view(len(x), pieces, -1), [*block], shared_layout(block, x.dtype))
