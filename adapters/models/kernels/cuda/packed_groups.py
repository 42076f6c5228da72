"""Launches of grouped products with packed weights of experts. `triton/packed_groups.py` says how they are summed."""

from __future__ import annotations

import triton
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.packed import CudaPackedMatrix
from adapters.models.kernels.cuda.tiles import count_parts
from adapters.models.kernels.triton import packed_groups
from adapters.models.kernels.triton_launch import launch

FEW = 8  # pairs of a tile whose sums have their pieces side by side
_AHEAD = 128  # columns that each warp loads ahead, at most; 256 take as long
_ROUNDS = 8  # the most times that a program takes further rows
_BUCKET = 4  # rows of the smallest step, of which one may be real
_RESIDENT = 3  # programs of few pairs that a processor runs at a time


@frozen
class PairTiles:
    """The assignment of pairs to experts, on the device, for the experts of one turn.

    is_early: it was made before the kernel before the product started.
    """

    pairs: Tensor
    tiles: Tensor
    total: Tensor
    is_early: bool = False


@frozen
class PackedGroupTile:
    """Pairs of a tile, rows of the weight that a program takes at a time, blocks of it that each warp loads ahead, and
    warps. registers: the most of a thread; None: as many as the compiler likes.
    """

    pairs: int
    columns: int
    ahead: int = 1
    warps: int = 4
    registers: int | None = None


def choose_packed_group_tile(pairs: int, experts: int, weight: CudaPackedMatrix) -> PackedGroupTile:
    """Choose a tile for as many pairs as an expert has on average.

    Registers are few enough for `_RESIDENT` programs.
    """
    each = triton.cdiv(pairs, experts)
    if each > FEW:
        return PackedGroupTile(16 if each <= 16 else 32 if each <= 32 else 64, 64)
    block = weight.block_form.block
    ahead = max(count for count in range(1, _AHEAD // block + 1) if weight.piece // block % count == 0)
    warps = 8
    return PackedGroupTile(FEW, 16 * (warps // weight.pieces), ahead, warps, registers=80)


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
) -> None:
    """Multiply the pairs of each expert with its weight. weight: of all slots, one behind the other. gated: see
    `CudaWeight`.
    """
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
        "EARLY": dealt.is_early,
    }
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    parts = count_parts(weight.outputs, tile.columns)
    if tile.pairs > FEW:
        launch(packed_groups.multiply_many, (len(dealt.tiles) * parts,), *tensors, *sizes, **constants, **options)
        return
    # So many rounds that a step of one row has work for every processor. Most of its tiles do not exist.
    least = count_parts(len(dealt.tiles), _BUCKET)
    rounds = min(_ROUNDS, parts, count_parts(least * parts, _RESIDENT * processors))
    own = {
        "PIECES": weight.pieces,
        "AHEAD": tile.ahead,
        "EVEN": weight.columns == weight.pieces * weight.piece,
    }
    grid = (len(dealt.tiles) * count_parts(weight.outputs, tile.columns * rounds),)
    launch(packed_groups.multiply_few, grid, *tensors, *sizes, rounds, **constants, **own, **options)
