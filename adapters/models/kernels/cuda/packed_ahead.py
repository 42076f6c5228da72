"""Products with packed weights in kernels of Hopper: which weights and tiles they are for, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import launch_options, shared_layout
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper import (
    hopper_packed,
    hopper_packed_row,
    hopper_row_registers,
)
from adapters.models.kernels.triton_launch import launch

if TYPE_CHECKING:
    from adapters.models.kernels.cuda.packed import CudaPackedMatrix

AHEAD_ROWS = 8  # rows of x of a tile, and the most whose weights come ahead
_STEPS = {"uint4", "int4", "int8", "e4m3"}  # those that were measured, and those of the same arithmetic
_RESERVED = 1 << 10  # bytes of shared memory that each program takes in addition to its own
_BARRIERS = 1 << 8  # bytes of barriers, at most
_SCALES = 16  # bytes of the scales of the four words of a row of a block
_WORDS = gl.NVMMASharedLayout(128, 32, 4)
_LEVELS = gl.NVMMASharedLayout(32, 32, 5)


@frozen
class AheadTile:
    """Rows of the weight that a program has, columns of a step, steps that shared memory holds, and warps.

    stages: 0: words of one step wait in registers instead, of products of one row. registers: the most of a thread.
    programs: that a processor has at a time, at most, of products of one row. makes: scales are made before the row
    comes, where each word has one; otherwise levels come with words. fills: memory holds as many more steps as it has
    room for; otherwise it is left to programs of the kernels around.
    """

    outputs: int
    columns: int
    stages: int
    warps: int
    registers: int
    programs: int = 3
    makes: bool = True
    fills: bool = True

    def makes_scales(self, weight: CudaPackedMatrix) -> bool:
        return self.makes and weight.block_form.has_scale_of_word

    def count_rounds(self, weight: CudaPackedMatrix, processors: int) -> int:
        """Return how often a processor has as many programs as it can at a time."""
        return count_parts(weight.outputs, self.outputs * self.programs * processors)


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
# Where each word has a scale (decision 072): chains of up to two programs of a processor, and of more than three, and
# pieces of up to three programs, and of more.
FEW_CHAINS = AheadTile(64, 256, 4, 4, 80, programs=2, fills=False)
MANY_CHAINS = AheadTile(32, 256, 2, 2, 96, programs=9, makes=False)
FEW_PIECES = AheadTile(16, 128, 4, 8, 64, fills=False)
MANY_SCALED_PIECES = AheadTile(16, 128, 2, 8, 64, programs=5)
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
        fits = tile.programs * (count_whole_bytes(tile, weight) + _RESERVED) <= shared + _RESERVED
        return tile if fits else None
    found = fill_memory(tile, weight, processors, shared)
    if found is None and tile.makes_scales(weight):
        found = fill_memory(evolve(tile, columns=tile.columns // 2), weight, processors, shared)
    return found


def count_whole_bytes(tile: AheadTile, weight: CudaPackedMatrix) -> int:
    """Return the bytes of what a program of one row has in shared memory besides words: the row, and scales."""
    made = tile.outputs * (weight.columns // 128) * _SCALES if tile.makes_scales(weight) else 0
    return 2 * weight.columns + made


def _choose_chain(weight: CudaPackedMatrix, processors: int) -> AheadTile | None:
    """None: there are more rounds of programs, which keep memory busy by themselves."""
    steps = weight.layout.steps
    tile = ROW_CHAINS[steps]
    rounds = tile.count_rounds(weight, processors)
    if weight.block_form.has_scale_of_word:
        if FEW_CHAINS.count_rounds(weight, processors) == 1:
            return FEW_CHAINS
        if rounds > 1:
            return MANY_CHAINS if MANY_CHAINS.count_rounds(weight, processors) == 1 else None
    return tile if rounds <= _ROUNDS.get(steps, 1) else None


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
        return AheadTile(rows, 512 if weight.piece == 512 else 256, 0, 8, 128, programs=2)
    if weight.piece <= _SHORT:
        return AheadTile(rows, 256, 0, 8, 80)
    if weight.piece >= _LONG:
        return AheadTile(rows, 128, 0, 8, 80)
    if not weight.block_form.has_scale_of_word:
        return ROW_PIECES
    return FEW_PIECES if FEW_PIECES.count_rounds(weight, processors) == 1 else MANY_SCALED_PIECES


def fill_memory(tile: AheadTile, weight: CudaPackedMatrix, processors: int, shared: int) -> AheadTile | None:
    """Return the tile with as many stages as fit into memory together with a row of x. None: fewer fit than it has.

    A processor has as many programs at a time as it takes to have all of them at once.
    """
    programs = min(tile.programs, count_parts(count_parts(weight.outputs, tile.outputs), processors))
    columns = weight.pieces * tile.columns
    words = 4 * columns // weight.block_form.block * 128
    levels = columns // 128 * round_up_to_power(weight.levels.shape[2]) * 32
    stage = tile.outputs // 8 * (words if tile.makes_scales(weight) else words + levels)
    room = (shared + _RESERVED) // programs - _RESERVED - _BARRIERS - count_whole_bytes(tile, weight)
    stages = room // stage
    steps = weight.piece // tile.columns
    most = steps if tile.fills else min(steps, tile.stages)
    return evolve(tile, stages=min(most, stages)) if stages >= tile.stages else None


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
        sizes["MADE"] = tile.makes_scales(weight)
        described = _describe_weight(weight, tile, weight.pieces)
        whole = (weight.levels, x, out, weight.outputs)
        launch(hopper_packed_row.packed_row, grid, *described, *whole, LATE=is_late, **sizes, **options)
        return
    sizes = {"EACH": weight.piece // form.block, "AHEAD": tile.columns // form.block}
    sizes |= {"PIECES": weight.pieces, "BLOCK_N": tile.outputs}
    given = (x, out, weight.outputs, weight.blocks)
    launch(hopper_row_registers.packed_row_registers, grid, *weight.tensors, *given, **sizes, **options)


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
