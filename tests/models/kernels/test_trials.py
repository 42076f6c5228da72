"""Tests of what trials of a product find out about row counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.interfaces.product_list import NATIVE, PACKED
from adapters.models.kernels.proof.trials import BETWEEN, Trial

COUNTS = (4, 8, 16)


def trial(way: str, odd: int = 0) -> Trial:
    """odd: the number of rows that are computed in another way."""

    def multiply(x: Tensor) -> Tensor:
        return x * (3.0 if len(x) == odd else 2.0)

    x = torch.arange(1.0, 1 + 16 * 8).view(16, 8)
    return Trial("a product", way, x, (torch.get_num_threads(),), multiply)


@pytest.mark.parametrize("way", [NATIVE, PACKED, "float32"])
def test_counts_that_agree_are_one_group(way: str) -> None:
    [group] = (tried := trial(way)).find_groups(COUNTS)
    assert group.rows == [*COUNTS]
    assert not tried.failures


@pytest.mark.parametrize("odd", [*BETWEEN, *COUNTS])
@pytest.mark.parametrize("way", [NATIVE, PACKED])
def test_what_passes_padded_rows_over_has_to_agree_in_any_number_of_rows(way: str, odd: int) -> None:
    tried = trial(way, odd)
    assert tried.find_groups(COUNTS) == []
    [failure] = tried.failures
    assert f"{odd} rows" in failure or f"[{odd}] rows" in failure or f"from [{odd}]" in failure


def test_what_computes_them_is_asked_for_buckets_alone() -> None:
    [group] = trial("float32", 5).find_groups(COUNTS)
    assert group.rows == [*COUNTS]
    assert [one.rows for one in trial("float32", 8).find_groups(COUNTS)] == [[4, 16], [8]]
