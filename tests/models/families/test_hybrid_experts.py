"""Hybrids with experts: rows have the same bits in any pieces, published layouts are read, the rest is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_5 import FULL, LINEAR
from adapters.models.families.qwen3_next import FAMILY, Qwen3NextConfig
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import proven, same_bits, save_model, shard_of, tokens_of
from tests.models.hybrids import (
    SPARSE,
    advance,
    check_rolled_back_rows,
    check_rows_in_pieces,
    check_slots_side_by_side,
    config,
    whole_of,
)
from tests.models.kernels.test_experts import stack

OWN = config(
    *((2, 4, 24, 20), 300, 64, 130, 2, 3, 1, 32, 2048, 1e4),
    kinds="lf",
    rotated=8,
    family=Qwen3NextConfig,
    experts=ExpertsShape(9, 3, 40, is_normalized=True, shared=24),
)


@pytest.fixture(scope="module")
def whole():
    """A shard whose slot 0 holds a sequence computed in chunks of C, with the last layer's output."""
    dtype = torch.bfloat16
    how = {"slots": 4, "capacity": 512, "aux_layers": (1,), "state_checkpoints": 2}
    return whole_of(
        DenseShard(
            OWN,
            RandomWeights(OWN, scale=0.125),
            proven(OWN, dtype, 512).copy_for_shard(),
            ShardPlacement(dtype=dtype, **how),
        )
    )


@pytest.mark.parametrize("pieces", [[(16, 13), (8, 7)], [(128, 100), (32, 31), (0, 200)], [(0, 0), (4, 3)]], ids=str)
def test_rows_in_any_pieces_are_rows_of_chunks_bit_for_bit(whole, pieces):
    check_rows_in_pieces(whole, pieces)


def test_what_is_rolled_back_has_never_happened(whole):
    check_rolled_back_rows(whole, 250, 5)


def test_slots_side_by_side_are_each_as_if_alone(whole):
    check_slots_side_by_side(whole)


def saved(folder, name):
    model_type, settings = SPARSE[name]
    save_model(folder, model_type, **settings)
    return folder


def settings(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_model_of_several_media_with_experts_in_one_tensor_is_read_as_its_text_alone(tmp_path):
    """Qwen3.5's checkpoints are published so."""
    folder, tokens = saved(tmp_path, "qwen3_5_moe"), tokens_of(70)
    expected, plain = advance(shard_of(folder), tokens, [64, 6]), Checkpoint.open(folder).config
    stack(folder)
    inner = {name: value for name, value in settings(folder).items() if name != "intermediate_size"}
    raw = {"model_type": "qwen3_5_moe", "text_config": inner, "vision_config": {"model_type": "qwen3_5_moe"}}
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["lm_head.weight"] = tensors["lm_head.weight"]
    renamed["model.visual.patch_embed.proj.weight"] = torch.ones(3, 5)
    renamed["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(9, 80, 64)
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.experts == plain.experts
    assert checkpoint.others["mtp.layers.0.mlp.experts.3.up_proj.weight"].shape == (40, 64), "a draft may be made of it"
    assert same_bits(advance(shard_of(folder), tokens, [64, 6]), expected)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob False is not supported; accepted: True"),
        ("qwen3_5_moe", {"mlp_only_layers": [0]}, "mlp_only_layers a JSON list is not supported; accepted: []"),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported; accepted: 1"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ("qwen3_5_moe", {"text_config": {"model_type": "qwen3_5_text"}}, "accepted: 'qwen3_5_moe_text'"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0 is not an int"),
        ("qwen3_next", {"num_experts": None}, "num_experts is missing"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num"),
        ("qwen3_next", {"quantization_config": {"bits": 4}}, "quant_method None is not supported; accepted"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, name, changes, said):
    folder = saved(tmp_path, name)
    (folder / "config.json").write_text(json.dumps(settings(folder) | changes))
    with pytest.raises(CheckpointError, match=re.escape(said)):
        Checkpoint.open(folder)


def test_a_dense_model_with_experts_is_told_which_it_is_not(tmp_path):
    folder = saved(tmp_path, "qwen3_5_moe")
    (folder / "config.json").write_text(json.dumps(settings(folder) | {"model_type": "qwen3_5_text"}))
    with pytest.raises(CheckpointError, match="num_experts 9 is not supported; accepted: 0"):
        Checkpoint.open(folder)


def test_every_kind_of_layer_is_probed(tmp_path):
    """One with a recurrent state and experts, one with the state alone, one of attention and experts."""
    own = Checkpoint.open(saved(tmp_path, "qwen3_next")).config
    kinds = [(small.layer_types[0], small.dense_layers) for small, _ in own.list_probed_layers()]
    assert kinds == [(LINEAR, ()), (LINEAR, (0,)), (FULL, ())]
    assert all(small.experts.count == 6 for small, _ in own.list_probed_layers())
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    found = probe(
        FAMILY, own, CpuKernels(dtype), ProbeShape(device=cpu, dtype=dtype, chunk=128, capacity=256, sizes=(4, 16))
    )
    assert (found.mode, found.buckets) == ("buckets", (4, 16, 128))


def test_sizes_of_the_80b_are_those_that_are_published():
    raw = {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_scaling": None,
    }
    found = FAMILY.parse(raw)
    every = sum(torch.Size(shape).numel() for shape in found.tensors().values())
    assert round(every / 1e9, 1) == 79.7
    assert found.rotated == 64
    assert found.layer_types.count(FULL) == 12
