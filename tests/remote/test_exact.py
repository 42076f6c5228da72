"""Layers in another process give the bits of layers here, whatever is asked of them, with shared memory and without."""

from __future__ import annotations

import pytest

from tests.models.splits import CONFIGS, CUTS, assert_alike, story, story_of, whole_of
from tests.pairs import usual_where
from tests.remote.daemons import RandomModel, Threads, split


@usual_where(lambda places: places["sharing"] == places["cuts"] % 2)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("cuts", [CUTS["one"], CUTS["two"], CUTS["three"]], ids=["one", "two", "three"])
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "sent"])
def test_any_split_over_processes_gives_the_bits_of_one_shard(kind: str, cuts, sharing) -> None:
    whole = whole_of(kind)
    parts = split(CONFIGS[kind], cuts, lambda: Threads(RandomModel(CONFIGS[kind]), sharing=sharing))
    assert story(parts) == story_of(kind)
    assert_alike(parts, whole)
    parts.close()
