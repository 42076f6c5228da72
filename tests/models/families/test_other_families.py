"""Checkpoints of Mistral, GLM and MiniMax in the forms in which they are published, and what is refused of them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.family import family_of
from adapters.models.families.llama import LlamaConfig
from adapters.models.families.mistral import Ministral3Config
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import VARIANTS, run_in_pieces, same_bits, save_model, shard_of, tokens_of
from tests.models.windowed import FULL, GEMMA4, SLIDING, parse_config


def save_variant(folder, name: str) -> None:
    model_type, settings = VARIANTS[name]
    save_model(folder, model_type, **settings)


def read_settings(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def rewrite(folder, settings: dict, rename) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("kind", ["mistral", "ministral3, scaled queries"])
def test_the_text_part_of_a_model_that_handles_images_is_the_model_alone(tmp_path, kind, prefix):
    save_variant(tmp_path, kind)
    tokens = tokens_of(200)
    expected = run_in_pieces(shard_of(tmp_path), tokens, [(256, 200)])
    text = read_settings(tmp_path)
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."

    def rename(name: str) -> str:
        return name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head, 1)

    rewrite(tmp_path, {"model_type": "mistral3", "text_config": text, "vision_config": {}}, rename)
    tensors = load_file(tmp_path / "model.safetensors")
    for image in ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"):
        tensors[image] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    assert same_bits(run_in_pieces(shard_of(tmp_path), tokens, [(256, 200)]), expected)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_layers_of_gemma_4_may_be_named_by_numbers_with_leading_zeros(width):
    """transformers writes 05 where there are more than ten layers."""
    kinds = [SLIDING] * 5 + [FULL]
    full = {"head_dim": 64, "num_key_value_heads": 1}
    settings = {**GEMMA4, "num_hidden_layers": 6, "layer_types": kinds, "global_head_dim": None}
    settings["per_layer_config"] = {f"{5:0{width}}": full}
    config = parse_config("gemma4_text", settings)
    assert [(kind.head_dim, kind.num_kv_heads) for kind in config.kinds] == [*[(16, 2)] * 5, (64, 1)]


def test_queries_are_scaled_only_where_the_configuration_says_so(tmp_path):
    save_variant(tmp_path, "ministral3, scaled queries")
    settings = read_settings(tmp_path)
    found = family_of(settings).parse(settings)
    assert isinstance(found, Ministral3Config)
    assert (found.beta, found.original) == (0.3, 128)
    assert found.rotary.tables(128, torch.device("cpu")).query_scale is None, "all factors are 1"
    factors = found.rotary.tables(129, torch.device("cpu")).query_scale
    assert factors is not None
    assert factors[127] == 1 < factors[128]
    settings["rope_parameters"]["llama_4_scaling_beta"] = 0
    assert type(family_of(settings).parse(settings)) is LlamaConfig


def test_a_prediction_head_behind_the_last_layer_is_not_part_of_the_model(tmp_path):
    save_variant(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    behind = {
        name.replace("layers.2.", "layers.3."): one.clone() for name, one in tensors.items() if "layers.2." in name
    }
    hidden = tensors["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        behind[f"model.layers.3.{name}.weight"] = torch.ones(hidden)
    behind["model.layers.3.eh_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    behind["model.layers.3.embed_tokens.weight"] = torch.zeros(160, hidden)
    behind["model.layers.3.shared_head.head.weight"] = torch.zeros(160, hidden)
    save_file(tensors | behind, tmp_path / "model.safetensors")
    opened = Checkpoint.open(tmp_path)
    assert opened.tensors.keys() == opened.config.tensors().keys()
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"} <= opened.others.keys()
    assert "mtp.layers.0.mlp.shared_expert.up_proj.weight" in opened.others


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window 4096 is not supported; accepted: null"),
        ("seed_oss", {"attention_bias": False}, "attention_bias False is not supported; accepted: True"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias true is not supported; accepted: false"),
        ("glm4_moe", {"attention_bias": False}, "attention_bias false is not supported; accepted: true"),
        ("glm4_moe", {"n_routed_experts": None}, "num_experts is missing"),
        ("glm4_moe", {"n_group": 2}, "9 experts in n_group 2 groups"),
        ("glm4_moe", {"n_routed_experts": 12, "n_group": 6, "topk_group": 1}, "have no room for num_experts_per_tok 3"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor 0 is not a positive number"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; accepted: 'sigmoid'"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
        ("minimax_m2", {"model_type": "glm_moe_dsa"}, "needs attention to rows that an indexer chooses (DSA)"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, name, changes, said):
    save_variant(tmp_path, name)
    settings = read_settings(tmp_path) | changes
    with pytest.raises(CheckpointError, match=re.escape(said)):
        family_of(settings).parse(settings)


def test_a_checkpoint_needs_one_of_two_tokenizer_files(tmp_path):
    save_variant(tmp_path, "mistral")
    (tmp_path / "tokenizer.json").rename(tmp_path / "tekken.json")
    assert Checkpoint.open(tmp_path).family.model_type == "mistral"
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Checkpoint.open(tmp_path)
