"""Tiles of the candidate for products of many rows: every column is in one cut, and no processor idles for long."""

from __future__ import annotations

import pytest
import torch

from benchmarks.candidates.wide_tiles import cut_columns_ahead

PROCESSORS = 132


@pytest.mark.parametrize("rows", [129, 256, 512, 1024, 2048])
@pytest.mark.parametrize("columns", [72, 448, 4096, 5120, 6144, 24576, 34816])
def test_columns_are_cut_into_pieces_that_lie_side_by_side(rows, columns):
    cuts = cut_columns_ahead(rows, columns, PROCESSORS, torch.bfloat16)
    assert cuts[0].first == 0
    assert [cut.first + cut.columns for cut in cuts] == [*(cut.first for cut in cuts[1:]), columns]
    assert all(cut.first % 256 == 0 for cut in cuts)


def test_a_wave_that_is_not_full_has_smaller_tiles():
    large, rest = cut_columns_ahead(1024, 5120, PROCESSORS, torch.bfloat16)
    assert (large.columns, large.tile.columns, rest.tile.columns) == (4096, 256, 64)
    [whole] = cut_columns_ahead(1024, 4096, PROCESSORS, torch.bfloat16)
    assert whole.tile.columns == 256
