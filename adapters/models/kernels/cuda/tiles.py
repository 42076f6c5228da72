"""Tiles of products and of attention on a CUDA device.

The choice is free, because an element of a product is one sum in one order, whatever the rows, columns and depth of a
tile (`triton/linear.py`). `KV_TILE` is not free: keys of a tile are added up together.
"""

from __future__ import annotations

from functools import cache

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.models.kernels.interfaces.layer_interface import NARROW

H200_SHARED = 227 << 10
PLANNED_ROWS = (128, 1024)
KV_TILE = 64  # keys of a tile of attention
SPLIT = 256  # keys of a split of attention
_ALIGNED = 16  # a number that the compiler knows to be a multiple of this many
FEW_PAIRS = 8  # of a row and an expert, in a tile that has as many or fewer
TALL_ROWS = 64  # rows that a tensor core takes at once
LONG_SUM = 8192  # terms. Of 4,096 terms, 4,096 sums of 64 rows took the same time in either form.
_NARROW_PAIRS = 64  # all pairs of a product whose tiles do not fill the device unless they are narrow
WIDE_HEAD = 256  # tiles of wider heads are smaller, so that they fit into shared memory
# For each size of heads: the consumers of a program that attends with many rows, their registers, and the tiles that
# are loaded ahead. A processor runs one program.
CHAIN_AHEAD = {
    64: {"CONSUMERS": 2, "REGISTERS": 240, "K_STAGES": 4, "V_STAGES": 4},
    128: {"CONSUMERS": 2, "REGISTERS": 240, "K_STAGES": 4, "V_STAGES": 4},
    256: {"CONSUMERS": 1, "REGISTERS": 240, "K_STAGES": 2, "V_STAGES": 2},
}
# Heads that `plain_chain` serves: registers of its two consumers, and slots for tiles of keys and values.
PLAIN_CHAIN = {128: {"REGISTERS": 240, "STAGES": 4}}
# The same for `halved_chain`, where keys and values share the slots.
HALVED_CHAIN = {256: {"REGISTERS": 240, "STAGES": 3}}
# Of up to this many rows it has too few programs. On an H200, 512 rows behind 512 took 86 us instead of 58, and behind
# 7,680 269 instead of 346. Forwards that prompts share with decode rows of hybrids have 512.
HALVED_ROWS = 512
# As above, where rows are codes. Warps that unpack have the registers that consumers leave, of
# 256 for each thread of a group of either.
CODED_AHEAD = {
    64: {"CONSUMERS": 2, "REGISTERS": 208, "K_STAGES": 4, "V_STAGES": 4},
    128: {"CONSUMERS": 2, "REGISTERS": 216, "K_STAGES": 4, "V_STAGES": 4},
    256: {"CONSUMERS": 1, "REGISTERS": 216, "K_STAGES": 2, "V_STAGES": 2},
}
# For each size of heads the tiles that a split's program loads ahead. Two programs share a processor's memory; those of
# heads of 256 take all of it, and have eight warps. Those of heads of 512 have half of a value's columns.
AHEAD = {
    64: {"K_STAGES": 4, "V_STAGES": 4},
    128: {"K_STAGES": 4, "V_STAGES": 3},
    256: {"K_STAGES": 3, "V_STAGES": 3},
    512: {"K_STAGES": 3, "V_STAGES": 3},
}
# The same for a step of one row, whose programs have a processor each: all tiles of a split. On an H200 a step of
# 30B-A3B's shape took 0.6 us less for each layer, behind 512, 2,048 and 8,192 tokens.
AHEAD_OF_ROW = {128: {"K_STAGES": 4, "V_STAGES": 4}}
# The same for the kernel of `hopper_rows`, whose tiles of keys and of values share a ring. Those of 64
# take longer there.
ROWS_AHEAD = {256: 6, 512: 3}
AHEAD_PARTS = {512: 2}  # programs that share the columns of a value
AHEAD_QUERIES = 64  # rows of a program's tile of queries


def choose_tiles(q: Tensor) -> tuple[int, int]:
    """Return the rows of a tile of queries and the keys of a tile, for queries of this type and size."""
    return (32, 32) if q.dtype == torch.float32 or q.shape[2] > WIDE_HEAD else (64, KV_TILE)


def count_parts(count: int, size: int) -> int:
    """Return how many parts of `size` cover `count`. Triton's `cdiv` does the same but takes microseconds."""
    return -(-count // size)


def count_splits(capacity: int, window: int, rows: int) -> int:
    """Return how many splits a tile of up to `rows` rows has at most. window: see `AttentionRule`."""
    every = count_parts(capacity, SPLIT)
    return min(every, (window + rows - 2) // SPLIT + 2) if window else every


def count_shares(group: int, tile: int) -> int:
    """Return into how many equal parts the query heads of one key head are cut, so that each fits into a tile."""
    return next(parts for parts in range(1, group + 1) if not group % parts and group // parts <= tile)


def round_up_to_power(number: int) -> int:
    """Return the smallest power of two that is not less; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def rows_to_plan(bucket: int) -> int:
    """Return how many rows a step's tiles are planned for: one kernel for decode steps and one for chunks, rather
    than one for each bucket.
    """
    return next((rows for rows in PLANNED_ROWS if bucket <= rows), round_up_to_power(bucket))


@frozen
class Tile:
    """The part of a product that one program computes, `rows` x `columns` of the result, and how it does so.

    depth: terms of each sum that one step of the program's loop adds. warps: of 32 threads. stages: steps whose
    operands are in shared memory or on their way there.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@frozen
class Cut:
    """Columns of a product that are computed with one tile: from `first` on, `columns` many."""

    tile: Tile
    first: int
    columns: int


LARGE = Tile(256, 128, 64, 8, 4)
SMALL = Tile(128, 64, 128, 4, 4)
MIDDLE = Tile(128, 128, 64, 4, 3)
GATED = Tile(128, 256, 64, 8, 4)
# A tile of `fitted_tiles`, and what a wave of such tiles takes, in units of `_estimate_time`. On an H200 one wave of
# 512 rows and 5,120 columns took 150 us where a wave of the largest tiles took 174 (decision 080).
FITTED = Tile(128, 160, 64, 4, 5)
FITTED_TIME = 0.86
LAUNCH = 0.1  # what another launch must save at least, in units of `_estimate_time`


@cache
def cut_columns(
    count: int, columns: int, gated: bool, dtype: torch.dtype, processors: int, shared: int = H200_SHARED
) -> tuple[Cut, ...]:
    """Cut a product's columns so that processors idle little: whole waves of large tiles, then the rest.

    Up to NARROW rows one tile holds them all. A wave is as many tiles as there are processors. The tiles of a last
    wave that is not full take as long as a full one, so its columns are computed in smaller tiles if that is quicker.
    shared: bytes of shared memory that a program may have, which bounds how many steps are loaded ahead.
    """
    largest = GATED if gated else LARGE
    cuts: tuple[Cut, ...]
    if dtype == torch.float32:
        cuts = (Cut(Tile(16, 32, 32, 4, 3) if count <= NARROW else Tile(64, 64, 32, 8, 3), 0, columns),)
    elif count <= NARROW:
        cuts = (Cut(Tile(max(16, count), 64, 128, 4, 7), 0, columns),)
    else:
        cuts = (_choose_tile(count, 0, columns, (largest, MIDDLE, SMALL), processors),)
        height = count_parts(count, largest.rows)
        for waves in range(1, height * columns // largest.columns // processors + 1):
            first = waves * processors // height * largest.columns
            if 0 < first < columns:
                rest = _choose_tile(count, first, columns, (MIDDLE, SMALL), processors)
                cuts = min(cuts, (Cut(largest, 0, first), rest), key=lambda tried: _sum_times(count, tried, processors))
    return tuple(evolve(cut, tile=limit_stages(cut.tile, dtype, shared)) for cut in cuts)


@cache
def fits_processors(count: int, columns: int, dtype: torch.dtype, processors: int) -> bool:
    """Return whether tiles of `fitted_tiles` give a product less idle processors than `cut_columns` can.

    It is not gated, has more rows than NARROW, and its sums are one chain.
    """
    if dtype.itemsize != 2:
        return False
    programs = count_parts(count, FITTED.rows) * count_parts(columns, FITTED.columns)
    cuts = cut_columns(count, columns, False, dtype, processors)
    return FITTED_TIME * count_parts(programs, processors) < _sum_times(count, cuts, processors)


def _choose_tile(count: int, first: int, columns: int, tiles: tuple[Tile, ...], processors: int) -> Cut:
    cuts = (Cut(tile, first, columns - first) for tile in tiles)
    return min(cuts, key=lambda cut: _estimate_time(count, cut, processors))


def _sum_times(count: int, cuts: tuple[Cut, ...], processors: int) -> float:
    return sum(_estimate_time(count, cut, processors) for cut in cuts) + LAUNCH * (len(cuts) - 1)


def _estimate_time(count: int, cut: Cut, processors: int) -> float:
    """Estimate what the columns of a cut take, in units of a wave of the largest tiles. Measured on an H200.

    A middle tile has half the size, but takes as long alone as two of them do on one processor. A small one reads more
    for what it computes.
    """
    programs = count_parts(count, cut.tile.rows) * count_parts(cut.columns, cut.tile.columns)
    if cut.tile == MIDDLE:
        return 0.95 if programs <= processors else 1.05 * count_parts(programs, 2 * processors)
    return count_parts(programs, processors) * (0.36 if cut.tile == SMALL else 1.0)


@cache
def choose_tile_in_pieces(dtype: torch.dtype, shared: int) -> Tile:
    """Choose the tile of a product in pieces. A program has two sums of each element, so its tile is smaller."""
    return limit_stages(Tile(128, 128, 64, 8, 6), dtype, shared)


@cache
def choose_tile_ahead(count: int, dtype: torch.dtype, shared: int) -> Tile:
    """Choose a tile of `hopper_products.linear_ahead`.

    A step takes time whatever it sums, so with few rows it is deep. Rows that do not exist are zeros that must be
    written, so a tile has few rows.
    """
    rows = 8 if count <= 8 else max(16, count)
    wide = count <= 16
    return limit_stages(Tile(rows, 64, 256 if wide else 128, 4, 6 if wide else 7), dtype, shared)


@cache
def choose_tile_of_tall_rows(
    count: int, columns: int, depth: int, dtype: torch.dtype, processors: int, shared: int
) -> Tile | None:
    """Choose a tile of `linear_ahead` whose tall operand is rows of x; None: it is the weight.

    64 rows of a weight are as many bytes as 64 rows of x. If tiles of 64 outputs give work to at most half of all
    processors, these wait for bytes on their way to shared memory. So tiles have 32 outputs if sums are long.
    """
    few = 2 * count_parts(columns, TALL_ROWS) <= processors
    if not (few and TALL_ROWS // 2 < count <= TALL_ROWS and depth >= LONG_SUM):
        return None
    return limit_stages(Tile(TALL_ROWS, TALL_ROWS // 2, 128, 4, 9), dtype, shared)


def limit_stages(tile: Tile, dtype: torch.dtype, shared: int) -> Tile:
    """Return the tile with as many steps loaded ahead as shared memory holds."""
    fits = (shared - 4096) // ((tile.rows + tile.columns) * tile.depth * dtype.itemsize)
    return evolve(tile, stages=max(1, min(tile.stages, fits)))


def choose_piece(depth: int, dtype: torch.dtype) -> int:
    """Choose the columns of a piece of a router's product; 0: its sum is one chain, as that of float32."""
    pieces = 16
    return count_parts(depth, 64 * pieces) * 64 if dtype.itemsize == 2 else 0


@frozen
class GroupTile:
    """The step of one program: pairs x columns x depth, its warps, and the steps that are loaded ahead.

    is_ahead: it is a tile of `hopper_experts`.
    """

    pairs: int
    columns: int
    depth: int
    warps: int
    stages: int
    is_ahead: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.pairs, self.columns, self.depth

    @property
    def is_few(self) -> bool:
        """Return whether the kernel is one of those that need no tiles for the experts of one row."""
        return self.is_ahead

    @property
    def has_tall_weights(self) -> bool:
        """Return whether the weights are the taller operand, of which a tensor core takes 64 rows: where there are
        fewer pairs.
        """
        return self.pairs < 64


def choose_group_tile(pairs: int, experts: int, dtype: torch.dtype, shared: int) -> GroupTile:
    """Choose a tile for as many pairs as an expert has on average; weights are read once for each tile.

    shared: bytes of shared memory that a program may have, which bounds how many steps are loaded ahead.
    """
    each = count_parts(pairs, experts)
    if dtype == torch.float32:
        tile = GroupTile(16, 32, 32, 4, 3) if each <= 16 else GroupTile(64, 64, 32, 8, 3)
    elif each <= 16:
        tile = GroupTile(16, 64, 128, 4, 5) if pairs <= _NARROW_PAIRS else GroupTile(16, 128, 128, 4, 3)
    else:
        tile = GroupTile(64, 256, 64, 8, 4) if each <= 64 else GroupTile(128, 256, 64, 8, 4)
    fits = (shared - 4096) // ((tile.pairs + tile.columns) * tile.depth * dtype.itemsize)
    return evolve(tile, stages=max(1, min(tile.stages, fits)))


def choose_tile_of_experts(weight: Tensor, pairs: int, experts: int, shared: int, *, hopper: bool) -> GroupTile:
    """Choose a tile for the weights `[slots, N, K]` of all experts. hopper: see `CudaProducts`.

    Where an expert has few pairs on average, its weights are requested ahead. For that they must lie in one piece with
    those of the others. The compiler must also see that several numbers of a row of x can be copied at once.
    """
    found = None
    depth = weight.shape[2]
    even = depth % _ALIGNED == 0 and weight.is_contiguous()
    if hopper and weight.dtype.itemsize == 2 and even and pairs <= FEW_PAIRS * experts:
        found = choose_tile_of_pairs(depth, weight.dtype, shared)
    return found or choose_group_tile(pairs, experts, weight.dtype, shared)


@cache
def choose_tile_of_pairs(depth: int, dtype: torch.dtype, shared: int) -> GroupTile | None:
    """Choose a tile of `multiply_pairs_ahead`, or None where rows of x are too long to be in shared memory.

    A program has a processor for itself: all columns of its rows, and as many blocks of weights on their way as there
    is room for.
    """
    columns = 64
    block = 256
    rows = FEW_PAIRS * count_parts(depth, block) * block * dtype.itemsize
    stages = (shared - 2048 - rows) // (columns * block * dtype.itemsize)
    return GroupTile(FEW_PAIRS, columns, block, 4, min(stages, 6), is_ahead=True) if stages > 1 else None
