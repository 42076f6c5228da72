"""Layers in another process give the bits of layers here, whatever is asked of them, with shared memory and without."""

from __future__ import annotations

import pytest

from adapters.models.dense import DenseShard
from tests.models.test_pipeline import CONFIGS, CUTS, pipeline, story
from tests.remote.daemons import RandomModel, Threads, split


@pytest.fixture(scope="module", params=[*CONFIGS])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(kind) -> DenseShard:
    (part,) = pipeline(kind, (5,)).parts
    return part


@pytest.mark.parametrize("cuts", [CUTS["one"], CUTS["two"], CUTS["three"]], ids=["one", "two", "three"])
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "sent"])
def test_any_split_over_processes_gives_the_bits_of_one_shard(kind, whole, cuts, sharing) -> None:
    parts = split(CONFIGS[kind], cuts, lambda: Threads(RandomModel(CONFIGS[kind]), sharing=sharing))
    assert story(parts) == story(whole)
    assert (parts.layers, parts.row_spec, parts.state_specs) == (whole.layers, whole.row_spec, whole.state_specs)
    assert (parts.capacity, parts.slots, parts.buckets) == (whole.capacity, whole.slots, whole.buckets)
    assert (parts.vocab_size, parts.dtype, parts.device) == (whole.vocab_size, whole.dtype, whole.device)
    assert (parts.state_block, parts.state_places) == (whole.state_block, whole.state_places)
    assert parts.memory()["kv"] == whole.memory()["kv"]
    parts.close()
