"""Tiles of `wide.linear_wide_ahead`. The choice is free, because a product's rows and columns cannot change bits."""

from __future__ import annotations

from functools import cache

import torch
from attrs import evolve

from adapters.models.kernels.cuda.tiles import H200_SHARED, LAUNCH, Cut, Tile, count_parts, limit_stages

# Tiles, and what a wave of them takes compared with one of the largest. These are estimates: a tile has a fixed part
# and its arithmetic, and with 64 columns shared memory is the limit.
TILES = (Tile(128, 256, 64, 4, 4), Tile(128, 128, 64, 4, 6), Tile(128, 64, 64, 4, 8))
TIMES = {256: 1.0, 128: 0.53, 64: 0.31}


@cache
def cut_columns_ahead(
    count: int, columns: int, processors: int, dtype: torch.dtype, shared: int = H200_SHARED
) -> tuple[Cut, ...]:
    """Cut a product's columns: whole waves of the largest tiles, then the rest. count: rows.

    shared: bytes of shared memory that a program may have, which bounds how many steps are loaded ahead.
    """
    largest = TILES[0]
    height = count_parts(count, largest.rows)

    def estimate(cuts: tuple[Cut, ...]) -> float:
        waves = (count_parts(height * count_parts(cut.columns, cut.tile.columns), processors) for cut in cuts)
        times = (number * TIMES[cut.tile.columns] for number, cut in zip(waves, cuts, strict=True))
        return sum(times) + LAUNCH * (len(cuts) - 1)

    choices: list[tuple[Cut, ...]] = [(Cut(tile, 0, columns),) for tile in TILES]
    for waves in range(1, height * columns // largest.columns // processors + 1):
        first = waves * processors // height * largest.columns
        if 0 < first < columns:
            choices += [(Cut(largest, 0, first), Cut(tile, first, columns - first)) for tile in TILES]
    cuts = min(choices, key=estimate)
    return tuple(evolve(cut, tile=limit_stages(cut.tile, dtype, shared)) for cut in cuts)
