"""The tiles of grouped products of experts, and launches of those with packed weights.

`triton/packed_groups.py` says how they are summed.
"""

from __future__ import annotations

import torch
import triton
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options
from adapters.models.kernels.cuda.packed import CudaPackedMatrix
from adapters.models.kernels.cuda.packing.many_rows import divide_piece
from adapters.models.kernels.cuda.tiles import FEW_PAIRS, count_parts
from adapters.models.kernels.triton import packed_groups
from adapters.models.kernels.triton.experts import deal
from adapters.models.kernels.triton.hopper.hopper_groups import gather_rows, multiply_many_ahead
from adapters.models.kernels.triton.hopper.rows.packed_row_experts import multiply_registers
from adapters.models.kernels.triton_launch import launch

_AHEAD = 384  # columns that each warp loads ahead, at most
_OWN_SHARED = 5 << 10  # bytes of a program's shared memory next to rows of x, about
_NUMBER = 2  # bytes of a number of x
_RING_BYTES = 192 << 10  # of shared memory for rows of x that come in bulk
_COUNTED = 4096  # pairs that a program counts at once
_MANY = 32  # pairs of an expert on average, from which on a weight is unpacked for up to 128 pairs
_MIDDLING = 48  # a tile of 64 pairs takes three quarters of the time of one of 128
_GATHERED = 1024  # columns of a row that a warp gathers
_WIDE_ROWS = 128  # of the weight, that a program for so many pairs has
_ROW_WARPS = 4  # of a program for one row
_ROW_BLOCKS = 4  # that wait in the registers of a warp there
_REGISTERS = 1 << 16  # of a processor
_LEAST_REGISTERS = 80  # of a thread that holds so many blocks
_MOST_REGISTERS = 168


@frozen
class PairTiles:
    """The assignment of pairs to experts, on the device, for the experts of one turn.

    is_early: it was made before the kernel before the product started. experts: there is one row, whose experts out of
    so many are in all three tensors; 0: there are tiles. The kernels of few pairs take either (`read_tile`).
    """

    pairs: Tensor
    tiles: Tensor
    total: Tensor
    is_early: bool = False
    experts: int = 0

    @classmethod
    def of_row(cls, chosen: Tensor, experts: int) -> PairTiles:
        """Return what stands for the tiles of one row. chosen: int32 `[1, k]`, out of so many experts."""
        own = chosen.view(-1)
        return cls(own, own, own, experts=experts)

    @property
    def constants(self) -> dict[str, int]:
        """Return what a kernel of few pairs knows of tiles before it runs."""
        tiles = len(self.tiles) if self.experts else 0
        return {"TILES": tiles, "EXPERTS": self.experts, "EARLY": self.is_early}


def deal_pairs(chosen: Tensor, slots_by_expert: Tensor | None, height: int, count: int, pdl: bool | None) -> PairTiles:
    """Collect the pairs of each of `count` experts in tiles of up to `height`.

    slots_by_expert: int32, where the weights of this turn's experts are, -1 for others; None: all are in place.
    """
    pairs = chosen.numel()
    some = min(pairs, count)  # experts with pairs: each may have a tile that is not full
    dealt = PairTiles(
        chosen.new_empty(pairs),
        chosen.new_empty((pairs + some * (height - 1)) // height, 4),
        chosen.new_empty(1),
    )
    launch(
        deal,
        (count,),
        chosen,
        chosen if slots_by_expert is None else slots_by_expert,  # never read without
        dealt.pairs,
        dealt.tiles,
        dealt.total,
        pairs,
        COUNT=count,
        EXPERTS=triton.next_power_of_2(count),
        IN_SLOTS=slots_by_expert is not None,
        TILE=height,
        BLOCK=min(_COUNTED, triton.next_power_of_2(pairs)),
        **launch_options(4, pdl),
    )
    return dealt


@frozen
class PackedGroupTile:
    """Pairs of a tile, rows of the weight that a program takes at a time, blocks of it that each warp loads ahead, and
    warps.

    registers: the most of a thread; None: as many as the compiler likes. resident: programs of few pairs that a
    processor runs at a time. stages: blocks of rows of x in shared memory, of a tile of `hopper_groups`; 0: it is of
    another kernel.
    """

    pairs: int
    columns: int
    ahead: int = 1
    warps: int = 4
    registers: int | None = None
    resident: int = 0
    stages: int = 0

    @property
    def is_few(self) -> bool:
        """Return whether the kernel is one of those that need no tiles for the experts of one row."""
        return self.pairs <= FEW_PAIRS


def choose_packed_group_tile(
    pairs: int, experts: int, weight: CudaPackedMatrix, shared: int, *, hopper: bool = False
) -> PackedGroupTile:
    """Choose a tile for as many pairs as an expert has on average. shared: bytes of shared memory of a processor.
    hopper: there is a kernel for many pairs, of weights without a gate. It was compared in MXFP4 alone.

    Programs of few pairs have their rows of x in shared memory, all columns of them. Where these do not fit, tiles are
    those of more pairs.
    """
    each = triton.cdiv(pairs, experts)
    room = FEW_PAIRS * weight.pieces * weight.piece * _NUMBER + _OWN_SHARED
    if each > FEW_PAIRS or room > shared:
        if hopper and each > _MANY and weight.layout.steps == "e2m1":
            height = 64 if each <= _MIDDLING else 128
            stages = _RING_BYTES // (height * weight.block_form.block * _NUMBER)
            return PackedGroupTile(height, _WIDE_ROWS, stages=stages)
        return PackedGroupTile(16 if each <= 16 else 32 if each <= 32 else 64, 64)
    block = weight.block_form.block
    ahead = max(count for count in range(1, _AHEAD // block + 1) if weight.piece // block % count == 0)
    warps = 8
    resident = min(2, shared // room)
    return PackedGroupTile(FEW_PAIRS, 16 * (warps // weight.pieces), ahead, warps, 128, resident)


def multiply_packed_groups(
    x: Tensor,
    weight: CudaPackedMatrix,
    out: Tensor,
    dealt: PairTiles,
    tile: PackedGroupTile,
    *,
    share: int,
    gated: int,
    processors: int,
    pdl: bool | None,
    hopper: bool = False,
) -> None:
    """Multiply the pairs of each expert with its weight. weight: of all slots, one behind the other. gated: see
    `CudaWeight`. hopper: there is a kernel for one row.
    """
    row_tile = choose_row_tile(x, weight, len(dealt.tiles), processors) if hopper and dealt.experts else None
    if row_tile is not None:
        _multiply_row(x, weight, out, dealt, row_tile, share=share, gated=gated, pdl=pdl)
        return
    if tile.stages:
        _multiply_gathered(x, weight, out, dealt, tile, share=share, gated=gated, pdl=pdl)
        return
    form = weight.block_form
    each = weight.piece // form.block
    apart = [one.stride(0) for one in weight.tensors]
    tensors = (*weight.tensors, x, out, dealt.pairs, dealt.tiles, dealt.total)
    sizes = (*apart, weight.outputs, weight.columns, weight.blocks, each)
    constants = {
        "SHARE": share,
        "BLOCK_M": tile.pairs,
        "BLOCK_N": tile.columns,
        "FORM": form,
        "GATED": gated,
    }
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    parts = count_parts(weight.outputs, tile.columns)
    if tile.pairs > FEW_PAIRS:
        grid = (len(dealt.tiles) * parts,)
        constants["EARLY"] = dealt.is_early
        launch(packed_groups.multiply_many, grid, *tensors, *sizes, **constants, **options)
        return
    own = {"PIECES": weight.pieces, "BLOCKS": weight.blocks, "EACH": each, "AHEAD": tile.ahead}
    own |= dealt.constants | {"WHOLE": weight.outputs % tile.columns == 0}
    grid = (min(len(dealt.tiles) * parts, tile.resident * processors),)
    launch(packed_groups.multiply_few, grid, *tensors, *sizes[:-2], **constants, **own, **options)


@frozen
class RowTile:
    """Warps that share the sums of 16 rows of a weight, those sums of a program, and the most registers of a thread."""

    parts: int
    rows: int
    registers: int


def choose_row_tile(x: Tensor, weight: CudaPackedMatrix, chosen: int, processors: int) -> RowTile | None:
    """Choose the tile of a product of one row's experts. None: other products are for it.

    Only a format for which it was quicker has one. A warp has up to four blocks of whole pieces. It has as many
    registers as all programs can have that are there at once.
    """
    form = weight.block_form
    each = weight.piece // form.block
    pieces = weight.blocks // each  # with columns
    is_even = weight.columns == pieces * weight.piece
    fitting = (parts for parts in (2, 4) if pieces % parts == 0 and weight.blocks // parts <= _ROW_BLOCKS)
    parts = next(fitting, None) if is_even else None
    if parts is None or not form.has_scale_of_word or x.dtype != torch.bfloat16:
        return None
    rows = 16 * _ROW_WARPS // parts
    if weight.outputs % rows:
        return None
    programs = count_parts(chosen * weight.outputs // rows, processors)
    registers = _REGISTERS // (32 * _ROW_WARPS * programs) // 8 * 8
    return RowTile(parts, rows, min(max(registers, _LEAST_REGISTERS), _MOST_REGISTERS))


def _multiply_row(
    x: Tensor,
    weight: CudaPackedMatrix,
    out: Tensor,
    dealt: PairTiles,
    tile: RowTile,
    *,
    share: int,
    gated: int,
    pdl: bool | None,
) -> None:
    """Multiply the experts of one row, each 16 rows of a weight in warps of their own."""
    form = weight.block_form
    each = weight.piece // form.block
    pieces = weight.blocks // each
    launch(
        multiply_registers,
        (len(dealt.tiles) * (weight.outputs // tile.rows),),
        *weight.tensors,
        x,
        out,
        dealt.pairs,
        *(one.stride(0) for one in weight.tensors),
        COLUMNS=weight.outputs,
        DEPTH=weight.columns,
        SHARED=share > 1,
        BLOCKS=weight.blocks,
        EACH=each,
        PARTS=tile.parts,
        OWN=pieces // tile.parts,
        EMPTY=weight.pieces - pieces,
        BLOCK_N=tile.rows,
        FORM=form,
        GATED=gated,
        EXPERTS=dealt.experts,
        EARLY=dealt.is_early,
        **launch_options(_ROW_WARPS, pdl),
        maxnreg=tile.registers,
    )


def _multiply_gathered(
    x: Tensor,
    weight: CudaPackedMatrix,
    out: Tensor,
    dealt: PairTiles,
    tile: PackedGroupTile,
    *,
    share: int,
    gated: int,
    pdl: bool | None,
) -> None:
    """Gather the rows of x in the order of their experts, so that bulk copies can bring them, and multiply them."""
    options = launch_options(4, pdl)
    pairs = len(dealt.pairs)
    columns = x.shape[1]
    gathered = x.new_empty(pairs, columns)
    grid = (count_parts(pairs, 4), count_parts(columns, _GATHERED))
    sizes = (pairs, len(x), columns)
    launch(gather_rows, grid, x, dealt.pairs, gathered, *sizes, SHARE=share, BLOCK=_GATHERED, **options)
    form = weight.block_form
    launch(
        multiply_many_ahead,
        (len(dealt.tiles) * count_parts(weight.outputs, tile.columns),),
        *weight.tensors,
        describe_blocks(gathered, tile.pairs, form.block),
        out,
        dealt.pairs,
        dealt.tiles,
        dealt.total,
        *(one.stride(0) for one in weight.tensors),
        weight.outputs,
        weight.blocks,
        weight.piece // form.block,
        STAGES=tile.stages,
        FORM=form,
        GATED=gated,
        PARTS=divide_piece(weight, 4),
        **options,
    )
