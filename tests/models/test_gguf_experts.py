"""Experts in GGUF files: those of a layer are in one tensor each, a head's too; what is said of them is checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from adapters.checkpoint.errors import CheckpointError
from adapters.models.checkpoint import Checkpoint
from adapters.models.mtp.checkpoint import HeadCheckpoint
from tests.models.checkpoints import EXPERTS, save_model
from tests.models.ggufs import packed, write_gguf
from tests.models.hybrids import save_with_head


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("experts")
    save_model(found, "qwen3_moe", **EXPERTS, norm_topk_prob=True, num_hidden_layers=2)
    return found


def test_a_head_of_experts_is_the_layer_behind_the_last(tmp_path: Path) -> None:
    save_with_head(tmp_path / "m", "qwen3_5_moe_text")
    folder = Checkpoint.open(tmp_path / "m")
    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m"))
    ours, theirs = HeadCheckpoint.open(file), HeadCheckpoint.open(folder)
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        assert torch.equal(ours.read(name) + 1, theirs.read(name) + 1), name


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ARCH.expert_gating_func": 2}, "qwen3moe.expert_gating_func 2 is not supported; accepted: 1"),
        ({"ARCH.expert_weights_norm": False}, "qwen3moe.expert_weights_norm False is not supported; accepted: True"),
        ({"ARCH.expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale 2.5 is not supported; accepted: 1.0"),
        ({"ARCH.expert_group_count": 4}, "qwen3moe.expert_group_count 4 is not supported; accepted: 0"),
        ({"ARCH.expert_count": None}, "qwen3moe.expert_count is missing"),
        ({"ARCH.expert_used_count": 10}, "num_experts_per_tok 10 is more than num_experts, 9"),
        ({"ARCH.expert_count": 8}, "tensor blk.0.ffn_gate_inp.weight has shape [9, 64]; accepted here: [8, 64]"),
        ({"ARCH.expert_feed_forward_length": 32}, "blk.0.ffn_gate_exps.weight has shape [40, 64]; accepted here: [32,"),
    ],
)
def test_what_is_not_served_is_refused_by_name(folder: Path, tmp_path: Path, fields: dict, said: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, **fields)
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open(path)
    assert said in str(found.value)


def test_experts_that_are_not_as_many_as_are_told_are_refused(folder: Path, tmp_path: Path) -> None:
    def fewer(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
        return packed(name, data[:7] if "up_exps" in name else data, kind)

    path = write_gguf(tmp_path / "m.gguf", folder, pack=fewer)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight has shape \[7, 40, 64\]; accepted here: 9 matrices"):
        Checkpoint.open(path)
