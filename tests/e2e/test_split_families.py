"""Models with windows over two processes, with a draft: as on one device, cold and restored from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.family_checkpoints import save_family
from tests.e2e.test_split import compare

# Cuts of six layers: behind the last layers whose rows others read, and between them. Other models: on both sides of
# layers with a window.
CUTS = {"gemma4": ("3,3", "5,1"), "gemma4_experts": ("1,2",), "gpt_oss": ("1,2",), "laguna": ("1,3", "2,2")}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "cut"), [(family, cut) for family, cuts in CUTS.items() for cut in cuts])
async def test_a_split_model_with_windows_answers_as_one_and_each_restores_what_the_other_has_kept(
    family: str, cut: str, tmp_path: Path
) -> None:
    model, draft = save_family(family, tmp_path)
    split = {"target_devices": "cpu:0,ipc+cpu:0", "target_layer_split": cut}
    plans = {"one": {"device": "cpu", "draft": str(draft)}, "apart": {**split, "draft": str(draft)}}
    pairs = await compare(str(model), tmp_path / "kv", 4, 12, ("one", "apart", "one", "apart"), plans=plans)
    assert pairs == {("one", "apart"), ("one", "one"), ("apart", "one"), ("apart", "apart")}
