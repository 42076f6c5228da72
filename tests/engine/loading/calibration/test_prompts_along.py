"""Prompts go along with decode steps where the device, the kernels and the settings allow it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from engine.loading.calibration import prompts_along
from engine.loading.calibration.prompts_along import with_prompts_along
from states.settings import Settings

HYBRID = Settings(chunk=1024, mixed_rows=512, stateful=True, commits_per_segment=True)
DENSE = Settings(chunk=2048, chunks_per_prefill=8, prompt_lane_min_rows=128)


def make_shard(*, runs_ahead: bool = True, span: int = 8) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(runs_ahead=runs_ahead), span=span, parts=(None,))


def test_a_hybrid_on_a_gpu_takes_prompts_along_and_a_lone_prompt_gets_a_few_chunks() -> None:
    found = with_prompts_along(HYBRID, make_shard())
    assert found == evolve(HYBRID, mixed_launches=True, chunks_per_prefill=8)
    assert with_prompts_along(HYBRID, make_shard(span=1)).chunks_per_prefill == 1


def test_prompts_of_a_dense_model_on_a_gpu_go_along_instead_of_having_a_lane() -> None:
    found = with_prompts_along(DENSE, make_shard())
    assert found == evolve(DENSE, mixed_launches=True, mixed_rows=1024, prompt_lane_min_rows=0)
    assert with_prompts_along(evolve(DENSE, chunk=256), make_shard()).mixed_rows == 256
    copying = evolve(DENSE, max_copied=8)
    assert with_prompts_along(copying, make_shard()) == evolve(found, max_copied=8), "this is the default"


def test_a_dense_model_whose_prompts_have_no_lane_stays_as_it_is() -> None:
    settings = evolve(DENSE, prompt_lane_min_rows=0)
    assert with_prompts_along(settings, make_shard()) == settings


def test_prompts_of_a_model_with_experts_keep_their_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        config = SimpleNamespace(experts=SimpleNamespace(count=8))

    monkeypatch.setattr(prompts_along, "DenseShard", Part)
    shard = make_shard()
    shard.parts = (Part(),)
    assert with_prompts_along(DENSE, shard) == DENSE


@pytest.mark.parametrize(
    ("changes", "runs_ahead"),
    [
        ({}, False),
        ({"mixed_rows": 0}, True),
        ({"stateful": False}, True),
        ({"commits_per_segment": False}, True),
        ({"max_proposals": 4}, True),
    ],
)
def test_nothing_changes_where_one_condition_is_missing(changes: dict[str, Any], runs_ahead: bool) -> None:
    settings = evolve(HYBRID, **changes)
    assert with_prompts_along(settings, make_shard(runs_ahead=runs_ahead)) == settings
