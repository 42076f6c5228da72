"""Attention over compressed rows: what a row is, what may be done with rows, and what is refused of such models."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.config.latent_config import LatentConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import family_of
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import GroupedExpertsShape, choose_experts
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import (
    LATENT_GROUPS,
    VARIANTS,
    run,
    run_in_pieces,
    same_bits,
    save_model,
    shard_of,
    tokens_of,
)
from tests.models.families.test_families_exact import CONFIGS
from tests.models.families.test_window_exact import PagedReference

CONFIG = CONFIGS["latent rows"]


def build(kernels, dtype=torch.float32, **more) -> DenseShard:
    weights = RandomWeights(CONFIG, scale=CONFIG.hidden_size**-0.5)
    return DenseShard(CONFIG, weights, kernels, ShardPlacement(dtype=dtype, slots=3, capacity=512, **more))


def parse(name: str, **changes) -> LatentConfig:
    model_type, settings = VARIANTS[name]
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 104, "num_hidden_layers": 3}
    usual = {**sizes, "num_attention_heads": 4, "max_position_embeddings": 2048, "rope_theta": 1e4}
    raw = {"model_type": model_type, **usual, **settings, **changes}
    found = family_of(raw).parse(raw)
    assert isinstance(found, LatentConfig)
    return found


def test_a_row_has_one_latent_and_one_rotated_part_whatever_the_number_of_heads():
    flash = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
    config = parse("glm4_moe_lite", **flash, num_attention_heads=20, num_key_value_heads=20)
    assert config.kv_bytes_per_token(torch.bfloat16) == 3 * 576 * 2
    assert config.kv_bytes_per_token(torch.int8) == 3 * 580
    shard = build(CpuKernels(torch.float32))
    assert shard.rows.spec.names == ("layers.0.k", "layers.1.k")
    assert shard.rows.spec.width == CONFIG.head_dim
    assert shard.memory()["kv"] == 3 * 512 * CONFIG.kv_bytes_per_token(torch.float32)


def test_rows_in_pages_are_rows_in_one_piece():
    tokens = tokens_of(400, CONFIG.vocab_size)
    plain, paged = build(ReferenceKernels()), build(PagedReference(), pages=6)
    expected = run_in_pieces(plain, tokens, [(256, 256)])
    for slot in range(3):
        assert torch.equal(run_in_pieces(paged, tokens, [(256, 256)], slot=slot), expected)
        one, other = plain.rows.export(0, 0, 400), paged.rows.export(slot, 0, 400)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("own", [True, False], ids=["in C", "by torch"])
def test_rows_in_8_bits_are_close_and_need_half_the_room(own):
    tokens = tokens_of(300, CONFIG.vocab_size)
    plain, coded = build(CpuKernels(torch.float32, own=own)), build(CpuKernels(torch.float32, own=own), rows=torch.int8)
    expected, found = (run_in_pieces(shard, tokens, [(256, 256)]) for shard in (plain, coded))
    # Of most rows: of some the router chooses another expert, which is a step in the error.
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).median() <= 0.02
    theirs = run_in_pieces(build(ReferenceKernels(), rows=torch.int8), tokens, [(256, 256)])
    assert (found - theirs).abs().amax(1).median() <= 1e-3
    assert coded.memory()["kv"] == 3 * 512 * 2 * (CONFIG.head_dim + 4)


def test_nodes_of_trees_are_rows_of_chains():
    tokens = tokens_of(60, CONFIG.vocab_size)
    shard = build(CpuKernels(torch.float32))
    run(shard, 64, (0, 0, tokens[:50]))
    branches = Step((Segment(0, 50, 4), Segment(0, 52, 2)), 8)
    given = torch.cat((tokens[50:54], tokens[56:58]))
    found = shard.logits(branches, shard.forward(branches, given).hidden)[:6].clone()
    shard.commit(branches, [(0, 1, 4, 5)])
    run(shard, 64, (1, 0, tokens[:50]))
    first = run(shard, 8, (1, 50, tokens[50:54]))
    second = run(shard, 8, (1, 52, tokens[56:58]))
    assert same_bits(found, torch.cat((first, second)))
    after = [run(shard, 4, (slot, 54, tokens[:1])) for slot in (0, 1)]
    assert same_bits(*after)


def test_a_prediction_head_behind_the_last_layer_is_apart_from_the_model(tmp_path):
    save_model(tmp_path, "glm4_moe_lite", **VARIANTS["glm4_moe_lite"][1])
    tensors = load_file(tmp_path / "model.safetensors")
    behind = {name.replace("layers.2.", "layers.3."): tensors[name].clone() for name in tensors if "layers.2." in name}
    behind["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors | behind, tmp_path / "model.safetensors")
    opened = Checkpoint.open(tmp_path)
    assert opened.tensors.keys() == opened.config.tensors().keys()
    assert opened.others.keys() >= {"mtp.fc.weight", "mtp.layers.0.self_attn.kv_b_proj.weight"}
    with pytest.raises(CheckpointError, match=r"tensor mtp\.pre_fc_norm_embedding\.weight is missing"):
        HeadCheckpoint.open(opened)


def test_layers_split_over_two_shards_give_the_bits_of_one(tmp_path):
    save_model(tmp_path, "deepseek_v3", **LATENT_GROUPS)
    tokens = tokens_of(50)
    whole = shard_of(tmp_path)
    front, back = shard_of(tmp_path, layers=range(2)), shard_of(tmp_path, layers=range(2, 3))
    step = Step((Segment(0, 0, 50),), 64)
    expected = whole.logits(step, whole.forward(step, tokens).hidden)
    found = back.logits(step, back.forward(step, front.forward(step, tokens).hidden).hidden)
    assert torch.equal(found[:50], expected[:50])


def test_experts_of_the_groups_with_the_best_expert_are_chosen_by_a_softmax():
    shape = GroupedExpertsShape(12, 3, 8, is_normalized=False, groups=4, chosen_groups=2, factor=2.0)
    logits = torch.randn(50, 12, generator=make_generator(3))
    chosen, weights = choose_experts(logits, shape)
    scores = logits.softmax(1)
    for row in range(50):
        best = scores[row].view(4, 3).amax(1).topk(2).indices
        allowed = {int(group) * 3 + index for group in best for index in range(3)}
        expected = sorted(allowed, key=lambda expert: -float(scores[row, expert]))[:3]
        assert chosen[row].tolist() == expected
        torch.testing.assert_close(weights[row], scores[row, expected] * 2.0)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias true is not supported"),
        ("glm4_moe_lite", {"num_key_value_heads": 2}, "num_key_value_heads is not num_attention_heads, 4"),
        ("glm4_moe_lite", {"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
        ("glm4_moe_lite", {"kv_lora_rank": None}, "hidden_size is missing"),
        ("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v2, plain queries", {"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ("deepseek_v2, plain queries", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("mistral4", {"n_group": 2}, "n_group 2 is not supported; accepted: 1"),
        ("mistral4", {"model_type": "deepseek_v32"}, "needs attention to rows that an indexer chooses"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, changes, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        parse(name, **changes)


def test_published_files_name_their_dense_layers_in_one_of_two_ways(tmp_path):
    save_model(tmp_path, "glm4_moe_lite", **VARIANTS["glm4_moe_lite"][1])
    settings = json.loads((tmp_path / "config.json").read_text())
    named = family_of(settings).parse(settings)
    del settings["mlp_layer_types"]
    counted = family_of(settings).parse(settings | {"first_k_dense_replace": 1})
    assert named == counted
