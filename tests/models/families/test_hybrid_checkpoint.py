"""Hybrid checkpoints in every layout that is published are read; what is not served is refused in one clear line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.text_files import find_end_tokens
from adapters.models.families.qwen3_5 import FULL, LINEAR, parse
from adapters.models.kernels.interfaces.delta_interface import DeltaShape
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import same_bits, save_model, shard_of, tokens_of
from tests.models.hybrids import HYBRIDS, advance

NAME = "three of four, key heads shared, tied"
PUBLISHED = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "full_attention_interval": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}


@pytest.fixture
def flat(tmp_path):
    folder = tmp_path / "flat"
    save_model(folder, "qwen3_5_text", **HYBRIDS[NAME])
    return folder


def settings(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def wrapped(folder, **text):
    """The same model as a text part of several media, as it is published."""
    inner = {name: value for name, value in (settings(folder) | PUBLISHED | text).items() if value != "absent"}
    tied = inner.pop("tie_word_embeddings")
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": inner,
        "tie_word_embeddings": tied,
        "vision_config": {"model_type": "qwen3_5", "depth": 2, "hidden_size": 16},
        "image_token_id": 7,
    }
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["model.visual.patch_embed.proj.weight"] = torch.ones(3, 5)
    renamed["mtp.fc.weight"] = torch.ones(64, 128)
    renamed["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(128, 64)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(sorted(renamed))}
    for file in set(names.values()):
        save_file({name: renamed[name] for name in names if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_a_model_of_several_media_is_read_as_its_text_alone(flat):
    tokens = tokens_of(70)
    expected = advance(shard_of(flat), tokens, [64, 6])
    plain = Checkpoint.open(flat).config
    wrapped(flat)
    checkpoint = Checkpoint.open(flat)
    assert checkpoint.config == plain
    assert same_bits(advance(shard_of(flat), tokens, [64, 6]), expected)
    assert {name.split(".")[0] for name in checkpoint.others} == {"model", "mtp"}
    assert checkpoint.others["mtp.fc.weight"].shape == (64, 128), "a draft may be made of them"
    assert not any("visual" in name or "mtp" in name for name in checkpoint.tensors)


def test_an_untied_head_lies_on_top(tmp_path):
    save_model(tmp_path, "qwen3_5_text", **HYBRIDS["every key head its own"])
    expected = advance(shard_of(tmp_path), tokens_of(9), [9])
    wrapped(tmp_path, full_attention_interval="absent")
    assert same_bits(advance(shard_of(tmp_path), tokens_of(9), [9]), expected)


def test_the_layers_kinds_follow_from_an_interval_where_they_are_not_told(flat):
    raw = {name: value for name, value in settings(flat).items() if name != "layer_types"}
    assert parse(raw | {"num_hidden_layers": 8}).layer_types == (*[LINEAR] * 3, FULL) * 2
    assert parse(raw | {"num_hidden_layers": 4, "full_attention_interval": 2}).layer_types == (LINEAR, FULL) * 2


def test_what_is_told_at_either_level_holds(flat):
    raw = settings(flat)
    text = {name: value for name, value in raw.items() if name not in ("tie_word_embeddings", "dtype")}
    nested = {"model_type": "qwen3_5", "text_config": text}
    assert parse(nested | {"tie_word_embeddings": True, "dtype": "bfloat16"}).tie_word_embeddings
    assert parse(nested | {"dtype": "bfloat16"}).dtype is torch.bfloat16
    assert not parse(nested).tie_word_embeddings
    assert parse({**nested, "text_config": {**text, "tie_word_embeddings": True}}).tie_word_embeddings
    told_nothing = {**nested, "text_config": {**text, "tie_word_embeddings": None, "dtype": None}}
    assert parse(told_nothing | {"tie_word_embeddings": True, "dtype": "bfloat16"}).tie_word_embeddings
    assert parse(told_nothing | {"tie_word_embeddings": True, "dtype": "bfloat16"}).dtype is torch.bfloat16
    assert not parse(told_nothing).tie_word_embeddings
    assert find_end_tokens({}, {"text_config": {"eos_token_id": 5, "vocab_size": 9}}) == (5,)
    assert find_end_tokens({}, {"eos_token_id": [3, 4], "text_config": {"eos_token_id": 5}}) == (3, 4)
    with pytest.raises(CheckpointError, match=r"eos_token_id 9 is not a token id in 0\.\.8"):
        find_end_tokens({}, {"text_config": {"eos_token_id": 9, "vocab_size": 9}})


def test_a_part_of_each_head_is_rotated(flat):
    raw = settings(flat)
    assert parse(raw).rotated == 4
    converted = {"type": "mrope", "rope_theta": 1e7, "mrope_section": [11, 11, 10]}
    old = {**raw, "rope_parameters": None, "rope_scaling": converted, "partial_rotary_factor": 0.5}
    assert (parse(old).rotated, parse(old).rope_theta) == (8, 1e7)


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm"])
def test_a_norm_multiplies_with_one_more_than_its_weight_in_float32_whatever_the_model_is_in(flat, norm):
    """Beside 1, bfloat16 has no room for a fifth of a percent."""
    said = list[torch.Tensor]()
    for weight in (0.0, 2.0**-9):
        tensors = load_file(flat / "model.safetensors")
        for name in [name for name in tensors if name.endswith(f"{norm}.weight")]:
            tensors[name] = torch.full_like(tensors[name], weight)
        save_file(tensors, flat / "model.safetensors")
        said.append(advance(shard_of(flat, torch.bfloat16), tokens_of(40), [40]))
    assert not same_bits(*said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16' is not supported; accepted: 'float32'"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported; accepted: True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported; accepted: 'swish', 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quant_method None is not supported; accepted: 'fp8', 'awq', 'gptq'"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3 is not supported; accepted: 4"),
        ({"num_experts": 8}, "num_experts 8 is not supported; accepted: 0"),
        ({"attention_bias": True}, "attention_bias true is not supported; accepted: false"),
        (
            {"layer_types": ["linear_attention"]},
            "layer_types is not a list of 4 kinds of layers; accepted: 'linear_att",
        ),
        ({"layer_types": ["mamba"] * 4}, "layer_types is not a list of 4 kinds of layers"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads 0 is not an integer in 1..512"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn' is not supported; accepted"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}},
            "3 of 16 numbers of a head are rotated",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}},
            "partial_rotary_factor 2 is more than 1",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "x"}},
            "partial_rotary_factor 'x' is not a pos",
        ),
        ({"text_config": 7}, "text_config is not an object"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type 'llama' is not supported"),
    ],
)
def test_what_is_not_served_is_refused_by_name(flat, changes, said):
    raw = settings(flat) | changes
    (flat / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(flat)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quantised_whole_is_refused_too(flat):
    wrapped(flat)
    (flat / "config.json").write_text(json.dumps(settings(flat) | {"quantization_config": {"bits": 8}}))
    with pytest.raises(CheckpointError, match="quant_method None is not supported"):
        Checkpoint.open(flat)


def test_a_tensor_under_two_names_is_refused(flat):
    tensors = load_file(flat / "model.safetensors")
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, flat / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is there twice, under different names"):
        Checkpoint.open(flat)


def test_sizes_of_the_27b_are_those_that_are_published():
    """144 MiB of recurrent state, 5.6 MiB of inputs of the convolution in float32, and 64 KiB a token."""
    raw = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {"rope_theta": 1e7},
    }
    config = parse(raw)
    assert config.linear == DeltaShape(16, 48, 128, 128)
    assert config.layer_types.count(FULL) == 16
    assert config.kv_bytes_per_token(torch.bfloat16) == 64 << 10
    assert config.state_bytes(torch.float32)[1] == pytest.approx((144 + 5.6) * 2**20, rel=0.01)
    host, gpu = (config.state_bytes(torch.bfloat16, kind)[0] >> 20 for kind in ("cpu", "cuda"))
    assert (host, gpu) == (675, 365), "kernels for CUDA keep less of the rows behind a state"
    assert config.rotated == 64
