"""Memory for weights: where they lie, and what goes back."""

from __future__ import annotations

import mmap

import pytest
import torch

from adapters.models.kernels.cpu.native.large_pages import LINE, PAGE, TOGETHER, LargePages
from adapters.models.kernels.offload import count_bytes


def test_weights_lie_behind_each_other_and_apart():
    pages = LargePages()
    one, other = pages.allocate((3, 5), torch.bfloat16), pages.allocate((7,), torch.float32)
    one.fill_(1)
    other.fill_(2)
    assert one.shape == (3, 5)
    assert one.dtype is torch.bfloat16
    assert one.is_contiguous()
    assert other.data_ptr() % LINE == 0
    assert bool((one == 1).all())
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert other.data_ptr() - one.data_ptr() == LINE


def test_each_is_charged_for_what_it_has_alone():
    pages = LargePages()
    weights = [pages.allocate((100,), torch.float32) for _ in range(3)]
    assert count_bytes(weights) == 1200


def test_one_that_is_larger_than_what_is_asked_for_at_once_has_its_own_part():
    pages = LargePages()
    first, large = pages.allocate((16,), torch.uint8), pages.allocate((TOGETHER + 1,), torch.uint8)
    large[-1] = 7
    first.fill_(3)
    assert int(large[-1]) == 7
    assert len(large) == TOGETHER + 1


def test_memory_outlives_whoever_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    kept = LargePages().allocate((1000,), torch.float32)
    kept.fill_(5)
    monkeypatch.setattr("adapters.models.kernels.cpu.native.large_pages.TOGETHER", PAGE)
    others = [LargePages().allocate((1000,), torch.float32).fill_(6) for _ in range(10)]
    assert float(kept.sum()) == 5000
    assert len(others) == 10


def test_a_system_that_gives_nothing_is_asked_the_usual_way(monkeypatch: pytest.MonkeyPatch):
    def refuses(_: int) -> mmap.mmap:
        raise MemoryError("no memory for that")

    monkeypatch.setattr("adapters.models.kernels.cpu.native.large_pages.map_memory", refuses)
    assert LargePages().allocate((4, 4), torch.float32).shape == (4, 4)
    assert LargePages().allocate((0, 4), torch.float32).numel() == 0
