"""Tests of the matrices of an FP8 folder that are multiplied with rows in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout
from adapters.checkpoint.quantised.quantisation_config import find_quantisation
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.numerics.synthetic import random_matrix
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import save_model
from tests.models.quantised import FORMATS, FP8, ct, quantise

ROUNDED = StepLayout("e4m3", 128, scale="float32", rounds_rows=True)
BLOCKS = FORMATS["float, blocks"][0]
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128}


def with_activations(**changes: Any) -> dict[str, Any]:
    """Return blocks of compressed-tensors with such activations."""
    group = {**BLOCKS["config_groups"]["group_0"], "input_activations": {**ACTIVATIONS, **changes}}
    return {**BLOCKS, "config_groups": {"group_0": group}}


CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "dynamic": (FP8, True),
    "static": ({**FP8, "activation_scheme": "static"}, False),
    "one scale": ({**FP8, "weight_block_size": None}, False),
    "compressed": (with_activations(), True),
    "compressed, kept": (BLOCKS, False),
    "compressed, by row": (with_activations(strategy="token", group_size=None), False),
    "compressed, static": (with_activations(dynamic=False), False),
    "integers": (ct("int-quantized", num_bits=8, strategy="channel", group_size=None), False),
}


@pytest.mark.parametrize(("config", "rounds"), CONFIGS.values(), ids=CONFIGS)
def test_only_blocks_whose_activations_are_dynamic_ask_for_rounded_rows(config: dict[str, Any], rounds: bool) -> None:
    found = find_quantisation({"quantization_config": config})
    assert found is not None
    assert {getattr(one, "rounds_rows", False) for one in found.packings} == {rounds}


@pytest.mark.timeout(60)
def test_a_folder_says_so_of_its_matrices_whose_groups_are_whole(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "qwen3", hidden_size=256, intermediate_size=320)
    quantise(tmp_path / "plain", tmp_path / "m", "fp8")
    layouts = Checkpoint.open(tmp_path / "m").layouts
    assert layouts["model.layers.0.mlp.up_proj.weight"] == ROUNDED
    assert not layouts["model.layers.0.mlp.down_proj.weight"].rounds_rows  # groups of 64 columns


@frozen
class OneLayout:
    """A source whose matrices all have one layout."""

    layout: StepLayout

    def read(self, name: str) -> Tensor:
        return self.read_packed(name).unpack(torch.float32)

    def find_layout(self, _name: str) -> StepLayout:
        return self.layout

    def read_packed(self, name: str) -> PackedMatrix:
        return random_matrix((256, 256), self.layout, name)


def test_rows_of_experts_are_not_rounded() -> None:
    read = WeightReader(OneLayout(ROUNDED), torch.device("cpu"), torch.bfloat16)
    names = ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.shared_expert.up_proj.weight")
    parts = read.matrix(*names).parts
    assert [part.layout.rounds_rows for part in parts if isinstance(part, PackedMatrix)] == [False, True]


def test_random_matrices_of_such_a_layout_have_whole_blocks() -> None:
    scale = random_matrix((256, 384), ROUNDED, "w").scale.view(2, 128, 3)
    assert torch.equal(scale, scale[:, :1].expand_as(scale))
    assert scale.unique().numel() == 6
