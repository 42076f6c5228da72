"""Tiles of products on a CUDA device. Which ones is free, since a product's rows and columns cannot change bits."""

from __future__ import annotations

from functools import cache

import torch
from attrs import evolve, frozen

from adapters.models.kernels.interface import NARROW

H200_SHARED = 227 << 10
PLANNED_ROWS = (128, 1024)


def parts(count: int, size: int) -> int:
    """Of `size` each, that `count` is covered by; as Triton's `cdiv`, which takes microseconds."""
    return -(-count // size)


def power_of_two(number: int) -> int:
    """The least that is no less; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def planned_rows(bucket: int) -> int:
    """As many as a step's tiles are planned for, whatever its bucket: a kernel for steps and one for chunks, and not
    one to be compiled for each bucket.
    """
    return next((rows for rows in PLANNED_ROWS if bucket <= rows), power_of_two(bucket))


@frozen
class Tile:
    """Rows x columns x depth of one program's step, its warps and the steps that are loaded ahead."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@cache
def choose_tile(
    count: int, columns: int, gated: bool, dtype: torch.dtype, processors: int, shared: int = H200_SHARED
) -> Tile:
    """Up to NARROW rows one tile holds them all; above, the largest tile that gives (nearly) every processor one.

    shared: bytes of shared memory a program may have, which bounds how many steps are loaded ahead.
    """
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 3) if count <= NARROW else Tile(64, 64, 32, 8, 3)
    if count <= NARROW:
        tile = Tile(max(16, count), 64, 128, 4, 7)
    else:
        largest = Tile(128, 256, 64, 8, 4) if gated else Tile(256, 128, 64, 8, 4)
        candidates = (largest, Tile(128, 128, 64, 4, 3), Tile(128, 64, 128, 4, 4))
        programs = [parts(count, tile.rows) * parts(columns, tile.columns) for tile in candidates]
        enough = (tile for tile, number in zip(candidates, programs, strict=True) if number >= 0.9 * processors)
        tile = next(enough, candidates[-1])
    return fitted(tile, dtype, shared)


@cache
def choose_tile_ahead(count: int, dtype: torch.dtype, shared: int) -> Tile:
    """Of `linear_ahead`. A step takes time whatever it sums, so with few rows it is long; and rows that are not there
    are zeros that have to be written, so there are few of them."""
    rows, wide = 8 if count <= 8 else max(16, count), count <= 16
    return fitted(Tile(rows, 64, 256 if wide else 128, 4, 6 if wide else 7), dtype, shared)


def fitted(tile: Tile, dtype: torch.dtype, shared: int) -> Tile:
    """With as many steps loaded ahead as there is shared memory for."""
    fits = (shared - 4096) // ((tile.rows + tile.columns) * tile.depth * dtype.itemsize)
    return evolve(tile, stages=max(1, min(tile.stages, fits)))
