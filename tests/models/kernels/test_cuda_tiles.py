"""Tiles of products on CUDA: every column is computed once, and processors idle little."""

from __future__ import annotations

import pytest
import torch

from adapters.models.kernels.cuda.tiles import H200_SHARED, choose_tile_of_tall_rows, cut_columns, fits_processors

PROCESSORS = 132


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("columns", [320, 4096, 5120, 6144, 16480, 34816, 151936])
@pytest.mark.parametrize("rows", [4, 128, 256, 512, 1024, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuts_cover_all_columns_in_order(rows, columns, gated, dtype):
    cuts = cut_columns(rows, columns, gated, dtype, PROCESSORS)
    assert [cut.first for cut in cuts] == [sum(cut.columns for cut in cuts[:number]) for number in range(len(cuts))]
    assert sum(cut.columns for cut in cuts) == columns
    assert all(cut.first % cut.tile.columns == 0 or cut.first % 128 == 0 for cut in cuts)


def test_a_last_wave_that_would_be_nearly_empty_is_computed_in_small_tiles():
    large, small = cut_columns(1024, 5120, False, torch.bfloat16, PROCESSORS)
    assert (large.tile.rows, large.tile.columns, large.columns) == (256, 128, 33 * 128)
    assert (small.tile.rows, small.tile.columns, small.columns) == (128, 64, 7 * 128)


def test_whole_waves_are_not_cut():
    [whole] = cut_columns(1024, 33 * 128, False, torch.bfloat16, PROCESSORS)
    assert whole.columns == 33 * 128


@pytest.mark.parametrize(
    ("rows", "columns", "fits"),
    [(512, 5120, True), (500, 5120, True), (256, 5120, False), (1024, 5120, False), (512, 16480, False)],
)
def test_tiles_of_160_columns_are_for_products_that_fill_no_wave_of_larger_ones(rows, columns, fits):
    assert fits_processors(rows, columns, torch.bfloat16, PROCESSORS) == fits
    assert not fits_processors(rows, columns, torch.float32, PROCESSORS)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "tall"),
    [
        (64, 4096, 12288, True),
        (33, 4096, 12288, True),
        (32, 4096, 12288, False),
        (65, 4096, 12288, False),
        (64, 4096, 4096, False),
        (64, 6144, 12288, False),
    ],
)
def test_rows_are_the_tall_operand_where_sums_are_long_and_programs_few(rows, columns, depth, tall):
    tile = choose_tile_of_tall_rows(rows, columns, depth, torch.bfloat16, PROCESSORS, H200_SHARED)
    assert (tile is not None) == tall
    if tile is not None:
        assert 4096 // tile.columns <= PROCESSORS
        assert tile.rows >= rows
