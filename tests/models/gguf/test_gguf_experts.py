"""Experts in GGUF files: those of a layer are in one tensor each, a head's too; what is said of them is checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.open_checkpoint import Checkpoint
from gguf import GGMLQuantizationType as Kind
from tests.models.checkpoints import EXPERTS, save_model
from tests.models.ggufs import packed, write_gguf
from tests.models.hybrids import SPARSE, save_with_head
from tests.pairs import with_first


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("experts")
    save_model(found, "qwen3_moe", **EXPERTS, norm_topk_prob=True, num_hidden_layers=2)
    return found


@with_first("family")
@pytest.mark.parametrize(("family", "own"), [("qwen3_5_moe_text", {}), ("qwen3_next", {"norm_topk_prob": True})])
def test_a_head_of_experts_is_the_layer_behind_the_last(tmp_path: Path, family: str, own: dict) -> None:
    save_with_head(tmp_path / "m", family, **own)
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


@pytest.fixture(scope="module")
def following(tmp_path_factory) -> Path:
    """A small Qwen3-Next."""
    found = tmp_path_factory.mktemp("next")
    save_model(found, "qwen3_next", **SPARSE["qwen3_next"][1] | {"norm_topk_prob": True, "mlp_only_layers": []})
    return found


def test_older_files_have_what_is_projected_as_it_was_published(following: Path, tmp_path: Path) -> None:
    file, folder = Checkpoint.open(write_gguf(tmp_path / "m.gguf", following, older=True)), Checkpoint.open(following)
    for name in folder.tensors:
        if "in_proj" in name:
            assert torch.equal(file.read(name), folder.read(name)), name


def test_what_is_projected_is_one_tensor_of_two_types(following: Path, tmp_path: Path) -> None:
    def gates(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
        return packed(name, data, Kind.Q8_0 if "attn_gate" in name else kind)

    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", following, Kind.BF16, pack=gates))
    stored = file.tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    assert stored.packing_name == "Q8_0"
    read = stored.with_dtype(torch.bfloat16).read("projected")
    published = Checkpoint.open(following).read("model.layers.0.linear_attn.in_proj_qkvz.weight")
    assert read.dtype == torch.bfloat16
    torch.testing.assert_close(read.float(), published, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ARCH.ssm.group_count": 3}, "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3"),
        ({"ARCH.ssm.group_count": 1}, "tensor blk.0.attn_qkv.weight has shape [128, 64]; accepted here: [96, 64]"),
        ({"ARCH.ssm.inner_size": 32}, "tensor blk.0.attn_qkv.weight has shape [128, 64]; accepted here: [96, 64]"),
        ({"ARCH.ssm.conv_kernel": 3}, "linear_conv_kernel_dim 3 is not supported; accepted: 4"),
        ({"ARCH.ssm.time_step_rank": 0}, "linear_num_value_heads 0 is not an integer"),
        ({"ARCH.ssm.state_size": None}, "qwen3next.ssm.state_size is missing"),
        ({"ARCH.expert_count": 0}, "num_experts 0 is not an integer"),
        ({"ARCH.expert_weights_norm": False}, "qwen3next.expert_weights_norm False is not supported; accepted: True"),
        ({"ARCH.expert_shared_feed_forward_length": None}, "expert_shared_feed_forward_length is missing"),
        ({"ARCH.rope.scaling.type": "yarn"}, "qwen3next.rope.scaling.type 'yarn' is not supported; accepted: 'none'"),
        ({"ARCH.nextn_predict_layers": 2}, "qwen3next.nextn_predict_layers 2 is not supported; accepted: 0"),
    ],
)
def test_what_is_odd_about_qwen3_next_is_refused_by_name(
    following: Path, tmp_path: Path, fields: dict, said: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", following, **fields)
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open(path)
    assert said in str(found.value)


def test_a_part_that_is_missing_is_told_by_its_name(following: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", following)
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_gate.weight", b"blk.0.attn_gone.weight"))
    with pytest.raises(CheckpointError, match=r"tensor blk.0.attn_gate.weight is missing"):
        Checkpoint.open(path)


def test_experts_that_are_not_as_many_as_are_told_are_refused(folder: Path, tmp_path: Path) -> None:
    def fewer(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
        return packed(name, data[:7] if "up_exps" in name else data, kind)

    path = write_gguf(tmp_path / "m.gguf", folder, pack=fewer)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight has shape \[7, 40, 64\]; accepted here: 9 matrices"):
        Checkpoint.open(path)
