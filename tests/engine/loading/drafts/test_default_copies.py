"""Earlier text is copied by default where a model comes without a draft, and a start takes no longer for it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.numerics.probe_result import Numerics
from engine.loading.choose_settings import choose_settings
from engine.loading.drafts.attach_draft import build_text_proposer
from engine.loading.drafts.load_draft import DraftNeighbours
from engine.loading.memory.memory_fit import Fit
from engine.loading.plan_load import ProvenPlan
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.options import build_options
from engine.settings.paths import choose_draft_name, copies_text
from tests.device.fake_shard import make_fake_shard

BUCKETS = (4, 8, 16, 32, 64)
NUMERICS = Numerics("buckets", BUCKETS, 16, BUCKETS[-1], "torch", 1, "one", 0.0, 0, 0)
needs_library = pytest.mark.skipif(build_text_matcher() is None, reason="there is no compiled library")


def make_neighbours(numerics: Numerics = NUMERICS, *, runs_ahead: bool = False) -> DraftNeighbours:
    shard: Any = SimpleNamespace(spec=SimpleNamespace(runs_ahead=runs_ahead))
    unused: Any = None
    return DraftNeighbours(shard, unused, numerics, unused)


@pytest.mark.parametrize(
    ("asked", "model", "draft", "copies"),
    [
        ("auto", "/models/a", "none", True),
        ("auto", "demo-hybrid", "mtp", False),
        ("auto+suffix", "demo-hybrid", "mtp", True),
        ("none", "/models/a", "none", False),
        ("suffix", "demo-hybrid", "none", True),
        ("mtp", "/models/a", "mtp", False),
        ("/drafts/b+suffix", "/models/a", "/drafts/b", True),
    ],
)
def test_text_is_copied_where_no_draft_is_given(asked: str, model: str, draft: str, copies: bool) -> None:
    assert (choose_draft_name(asked, model), copies_text(asked, model)) == (draft, copies)


@needs_library
def test_only_copies_that_were_asked_for_are_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    by_default = build_options(model="/models/a")
    assert build_text_proposer(by_default, make_neighbours()) is not None
    fast = evolve(NUMERICS, mode="fast")
    assert build_text_proposer(by_default, make_neighbours(fast)) is None
    assert not caplog.records
    assert build_text_proposer(build_options(model="/models/a", draft="suffix"), make_neighbours(fast)) is None
    assert "nothing is copied" in caplog.text


@needs_library
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("asked", "copies"), [("auto", True), ("suffix", True), ("none", False)])
def test_text_is_copied_by_default_wherever_the_target_is(asked: str, copies: bool, runs_ahead: bool) -> None:
    options = build_options(model="/models/a", draft=asked)
    assert (build_text_proposer(options, make_neighbours(runs_ahead=runs_ahead)) is not None) == copies


@needs_library
async def test_a_start_times_copies_only_if_they_were_asked_for(tmp_path: Path) -> None:
    matcher = build_text_matcher()
    assert matcher is not None
    lane = DeviceLane()
    parts = ExecutorParts(make_fake_shard(buckets=BUCKETS), BUCKETS, lane=lane, text_proposer=SuffixProposer(matcher))
    how = {"proven": ProvenPlan(Fit(4, 256), NUMERICS, (), "a"), "kept": CalibrationCache(tmp_path), "plan": ()}
    found = {}
    for asked in ("auto", "suffix"):
        options = build_options(model="/models/a", draft=asked)
        found[asked] = await lane.run(partial(choose_settings, options, parts, parts.shard, None, **how))
    assert found["auto"].max_copied == found["suffix"].max_copied > 0
    assert not found["auto"].rates.copy_times
    assert found["suffix"].rates.copy_times
    assert DeviceExecutor(parts).close()
