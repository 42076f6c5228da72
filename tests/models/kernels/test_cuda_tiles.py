"""Tiles of products on CUDA: every column is computed once, and processors idle little."""

from __future__ import annotations

import pytest
import torch

from adapters.models.kernels.cuda.tiles import cut_columns, cut_columns_ahead

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


@pytest.mark.parametrize("rows", [129, 256, 512, 1024, 2048])
@pytest.mark.parametrize("columns", [72, 448, 4096, 5120, 6144, 24576, 34816])
def test_columns_that_come_ahead_are_cut_into_pieces_that_lie_side_by_side(rows, columns):
    cuts = cut_columns_ahead(rows, columns, PROCESSORS, torch.bfloat16)
    assert cuts[0].first == 0
    assert [cut.first + cut.columns for cut in cuts] == [*(cut.first for cut in cuts[1:]), columns]
    assert all(cut.first % 256 == 0 for cut in cuts)


def test_a_wave_that_is_not_full_has_smaller_tiles_that_come_ahead():
    large, rest = cut_columns_ahead(1024, 5120, PROCESSORS, torch.bfloat16)
    assert (large.columns, large.tile.columns, rest.tile.columns) == (4096, 256, 64)
    [whole] = cut_columns_ahead(1024, 4096, PROCESSORS, torch.bfloat16)
    assert whole.tile.columns == 256
