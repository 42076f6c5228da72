"""Tests of where a drafter's weights are at the start: `auto` keeps them, unless the drafter's device is short of
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import define, evolve

from adapters.device.compression.score_prompt import Compressor
from engine.loading.background_load import load_target
from engine.loading.drafts.load_draft import is_short_of_memory
from engine.loading.load_scorer import load_if_kept
from engine.settings.options import build_options
from states.residency import After, Policy, Resolved
from states.settings import Settings
from tests.pairs import one_in

pytestmark = pytest.mark.usefixtures("rates_are_given")

GIB = 1 << 30


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the first start leaves what it has measured of this machine."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def a_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))


@one_in(2, "policy")
@pytest.mark.parametrize(
    ("policy", "after", "loaded"),
    [("auto", "keep", True), ("persistent", "keep", True), ("request-scoped", "release", False)],
)
async def test_a_started_server_has_the_drafter_where_the_policy_says(policy: Any, after: str, loaded: bool) -> None:
    how: dict[str, Any] = {"disk_prefix_cache": "off", "host_cache_budget": 0, "prefill_drafter": "demo"}
    options = build_options(model="demo", device="cpu", max_ctx=512, draft="none", draft_residency=policy, **how)
    target = await load_target(options)
    try:
        assert target.scorer is not None
        assert target.settings.residency.scorer == after
        assert bool(target.scorer.memory()["weights"]) == loaded
    finally:
        await target.close()


@pytest.mark.parametrize(
    ("device", "free", "coming", "short"),
    [
        ("cuda", 5 * GIB, 0, False),
        ("cuda", 4 * GIB - 1, 0, True),
        ("cuda", 5 * GIB, GIB, False),
        ("cuda", 5 * GIB, GIB + 1, True),
        ("cuda", GIB, 2 * GIB, True),
        ("cpu", 0, 100 * GIB, False),
    ],
)
def test_a_gpu_is_short_of_memory_once_less_than_a_twentieth_is_left_beside_what_is_coming(
    device: str, free: int, coming: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 * GIB))
    assert is_short_of_memory(torch.device(device), coming) == short


@define
class FullDevice:
    """Weights that find no room. It stands for a compressor, its scorer and the weights at once."""

    asked: int = 0

    @property
    def scorer(self) -> FullDevice:
        return self

    @property
    def weights(self) -> FullDevice:
        return self

    def load_back(self) -> int:
        self.asked += 1
        raise torch.OutOfMemoryError("no room")


def settings_of(policy: Policy, scorer: After) -> Settings:
    return Settings(residency=Resolved(policy, scorer=scorer))


def test_auto_releases_a_drafter_that_finds_no_room_after_all() -> None:
    settings, full = settings_of("auto", "keep"), FullDevice()
    found = load_if_kept(cast("Compressor", full), settings)
    assert found == evolve(settings, residency=Resolved("auto", scorer="release"))
    assert full.asked == 1


def test_a_persistent_drafter_that_finds_no_room_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        load_if_kept(cast("Compressor", FullDevice()), settings_of("persistent", "keep"))


def test_a_drafter_that_is_released_is_not_read_at_the_start() -> None:
    settings, full = settings_of("request-scoped", "release"), FullDevice()
    assert load_if_kept(cast("Compressor", full), settings) == settings
    assert full.asked == 0
