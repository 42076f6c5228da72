"""Each executor test runs on a digest of all its input and, where the arithmetic matters, on a small real model."""

from __future__ import annotations

import pytest

from adapters.device.lane.buckets import row_counts
from tests.device.driver import BUCKETS, drive, qwen3
from tests.device.fake_shard import FakeShard, make_fake_shard


@pytest.fixture(params=["fake", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def shard(request):
    return (
        make_fake_shard(buckets=row_counts(BUCKETS, fast=True))
        if request.param == "fake"
        else qwen3(device=request.param)
    )


@pytest.fixture
def fake():
    return FakeShard()


@pytest.fixture
def driver(shard):
    driver = drive(shard)
    yield driver
    assert driver.executor.close()


@pytest.fixture
def on_fake(fake):
    driver = drive(fake)
    yield driver
    assert driver.executor.close()
