"""Folders of random packed weights: that they open, and how large their weights are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.models.open_checkpoint import Checkpoint
from benchmarks.packed_folders import LISTERS, write_folder

LAYERS = 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("packing", LISTERS)
def test_a_folder_opens_and_its_weights_are_as_large_as_real_ones(packing: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / packing, "small", packing, LAYERS)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.num_layers == LAYERS
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == packing
    assert len(checkpoint.layouts) == 7 * LAYERS, "embedding and head are not packed"
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight", "lm_head.weight"):
        weights = checkpoint.read(name).float()
        assert 0.015 < float(weights.std()) < 0.025
        assert abs(float(weights.mean())) < 0.002
