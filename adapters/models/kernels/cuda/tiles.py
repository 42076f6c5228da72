"""Tiles of products on a CUDA device. The choice is free, because a product's rows and columns cannot change bits."""

from __future__ import annotations

from functools import cache

import torch
from attrs import evolve, frozen

from adapters.models.kernels.interface import NARROW

H200_SHARED = 227 << 10
PLANNED_ROWS = (128, 1024)


def count_parts(count: int, size: int) -> int:
    """Return how many parts of `size` cover `count`. Triton's `cdiv` does the same but takes microseconds."""
    return -(-count // size)


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
    """The step of one program: rows x columns x depth, its warps, and the steps that are loaded ahead."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@cache
def choose_tile(
    count: int, columns: int, gated: bool, dtype: torch.dtype, processors: int, shared: int = H200_SHARED
) -> Tile:
    """Choose a tile: up to NARROW rows one tile holds them all; above, the largest tile that gives (nearly) every
    processor one.

    shared: bytes of shared memory that a program may have, which bounds how many steps are loaded ahead.
    """
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 3) if count <= NARROW else Tile(64, 64, 32, 8, 3)
    if count <= NARROW:
        tile = Tile(max(16, count), 64, 128, 4, 7)
    else:
        largest = Tile(128, 256, 64, 8, 4) if gated else Tile(256, 128, 64, 8, 4)
        candidates = (largest, Tile(128, 128, 64, 4, 3), Tile(128, 64, 128, 4, 4))
        programs = [count_parts(count, tile.rows) * count_parts(columns, tile.columns) for tile in candidates]
        enough = (tile for tile, number in zip(candidates, programs, strict=True) if number >= 0.9 * processors)
        tile = next(enough, candidates[-1])
    return limit_stages(tile, dtype, shared)


@cache
def choose_tile_ahead(count: int, dtype: torch.dtype, shared: int) -> Tile:
    """Choose a tile of `hopper.linear_ahead`.

    A step takes time whatever it sums, so with few rows it is deep. Rows that do not exist are zeros that must be
    written, so a tile has few rows.
    """
    rows = 8 if count <= 8 else max(16, count)
    wide = count <= 16
    return limit_stages(Tile(rows, 64, 256 if wide else 128, 4, 6 if wide else 7), dtype, shared)


def limit_stages(tile: Tile, dtype: torch.dtype, shared: int) -> Tile:
    """Return the tile with as many steps loaded ahead as shared memory holds."""
    fits = (shared - 4096) // ((tile.rows + tile.columns) * tile.depth * dtype.itemsize)
    return evolve(tile, stages=max(1, min(tile.stages, fits)))
