"""Folders of DFlash 2 and DSpark as they are published, read and checked by name and shape."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint, list_draft_tensors
from adapters.models.drafts.dflash.config import DraftShapes, parse_draft_config
from adapters.models.drafts.dflash.parts import ConvolutionShape, LogitScale, MarkovShape, SelectorShape
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from tests.models.checkpoints import same_bits
from tests.models.corrected_drafts import CORRECTED, tensors_of
from tests.models.draft_models import TARGET, save_draft

# config.json of a published DFlash 2 draft, of a target with 52 layers of 6656.
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 6656, "intermediate_size": 19968, "layer_types": ["sliding_attention"] * 5, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 52,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "sliding_window": 2048,
    "use_sliding_window": True, "vocab_size": 202048,
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
        "mask_token_id": 201818, "output_multiplier": 0.19611613513818404, "selector_rank": 256, "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
}  # fmt: skip
# config.json of the DSpark draft for Qwen3-14B.
DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "attention_bias": False, "block_size": 7, "head_dim": 128,
    "confidence_head_with_markov": True, "enable_confidence_head": True, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 17408, "layer_types": ["full_attention"] * 5, "markov_head_type": "vanilla",
    "markov_rank": 256, "mask_token_id": 151669, "model_type": "qwen3", "num_attention_heads": 40,
    "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 40, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_window": None,
    "target_layer_ids": [1, 10, 19, 28, 37], "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def target_of(raw):
    sizes = {"hidden_size": raw["hidden_size"], "num_layers": raw["num_target_layers"]}
    return evolve(TARGET, vocab_size=raw["vocab_size"], **sizes)


def test_a_published_dflash2_is_what_its_config_says():
    names = ["candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel"]
    shapes = DraftShapes(6656, 19968, 5, 32, 8, 128, 5)
    config = parse_draft_config(DFLASH2, shapes, target_of(DFLASH2), names)
    assert config.parts.convolution == ConvolutionShape(2, 16)
    assert config.parts.selector == SelectorShape(202048, 256, 16)
    assert config.parts.scale == LogitScale(0.19611613513818404, 20.0)
    assert (config.block, config.rows, config.lead) == (16, 16, 1)
    assert config.masks == (AttentionMask(causal=False, window=2048),) * 5
    expected = list_draft_tensors(config)
    assert len(expected) == 81
    assert expected["layers.4.attention_conv.base_kernel"] == (2, 2, 6656)
    assert expected["layers.4.attention_conv.kernel_projection.weight"] == (1664, 6656)
    assert expected["candidate_selector.hidden_projection.weight"] == (256, 6656)
    assert expected["candidate_selector.successor_codebook"] == (202048, 256)


def test_a_published_dspark_is_what_its_config_says():
    names = ["markov_head.markov_w1.weight", "confidence_head.proj.weight"]
    shapes = DraftShapes(5120, 17408, 5, 40, 8, 128, 5)
    config = parse_draft_config(DSPARK, shapes, target_of(DSPARK), names)
    assert config.parts.markov == MarkovShape(151936, "vanilla", 256, has_confidence=True)
    assert (config.block, config.rows, config.lead) == (8, 7, 0)
    expected = list_draft_tensors(config)
    assert len(expected) == 11 * 5 + 3 + 4
    assert expected["markov_head.markov_w2.weight"] == (151936, 256)
    assert expected["confidence_head.proj.weight"] == (1, 5376)
    gated = parse_draft_config({**DSPARK, "markov_head_type": "rnn"}, shapes, target_of(DSPARK), names)
    assert list_draft_tensors(gated)["markov_head.joint_proj.weight"] == (768, 5120 + 512)


@pytest.fixture(params=[*CORRECTED])
def config(request):
    return CORRECTED[request.param]


def test_a_folder_is_read_whole(tmp_path, config):
    tensors = tensors_of(config)
    more = {"embed_tokens.weight": torch.zeros(211, 64), "lm_head.weight": torch.zeros(211, 64)}
    causal = {"is_causal": False} if any(mask.window for mask in config.masks) else {}
    save_draft(tmp_path, config, {**tensors, **more}, sliding_window=40, **causal)
    checkpoint = DraftCheckpoint.open(tmp_path, TARGET)
    assert checkpoint.config == config
    assert {*checkpoint.tensors} == {*tensors}
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        DraftCheckpoint.open(folder, TARGET)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "HERE")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DFlash 2", {"conv_group_size": 24}, "conv_group_size 24 does not divide hidden_size 64"),
        ("DFlash 2", {"conv_group_size": None}, "conv_group_size None is not an integer in 1..64"),
        ("DFlash 2", {"conv_kernel_size": 9}, "conv_kernel_size 9 is not an integer in 1..8"),
        (
            "DFlash 2",
            {"conv_kernel_size": 3},
            "layers.0.attention_conv.base_kernel has shape [2, 2, 64]; accepted here",
        ),
        ("DFlash 2", {"selector_rank": 31}, "candidate_selector.hidden_projection.weight has shape [32, 64]"),
        ("DFlash 2", {"selector_top_k": 0}, "selector_top_k 0 is not an integer in 1..128"),
        ("DFlash 2", {"selector_vocab_size": 100}, "selector_vocab_size is 100, but the target has 211"),
        ("DFlash 2", {"output_multiplier": -1}, "output_multiplier -1 is not a positive number"),
        ("DFlash 2", {"final_logit_softcapping": "x"}, "final_logit_softcapping 'x' is not a positive number"),
        ("DFlash 2", {"is_causal": 1}, "is_causal 1 is not true or false"),
        ("DFlash 2", {"architectures": ["DSparkDraftModel"]}, "but tensors markov_head.* are missing"),
        ("DSpark", {"architectures": ["DFlash2DraftModel"]}, "but tensors candidate_selector.* are missing"),
        ("DSpark", {"markov_head_type": "lstm"}, "markov_head_type 'lstm'; accepted: 'vanilla', 'gated', 'rnn'"),
        ("DSpark", {"markov_head_type": "gated"}, "tensor markov_head.gate_proj.weight is missing"),
        ("DSpark", {"markov_rank": 16}, "tensor markov_head.markov_w1.weight has shape [211, 32]; accepted here"),
        ("DSpark", {"markov_rank": None}, "markov_rank None is not an integer in 1..4096"),
        ("DSpark", {"confidence_head_with_markov": False}, "confidence_head.proj.weight has shape [1, 96]"),
        ("DSpark", {"sample_from_anchor": "yes"}, "sample_from_anchor 'yes' is not true or false"),
        ("DSpark", {"model_type": "gemma4_text"}, "model_type 'gemma4_text' is not a supported draft"),
        ("DSpark", {"target_layer_ids": [-1, 4, 6]}, "target_layer_ids are [-1, 4, 6]; accepted: different ones"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, name, changes, message):
    config = CORRECTED[name]
    save_draft(tmp_path, config, tensors_of(config), **{"sliding_window": 40, "is_causal": False, **changes})
    raw = json.loads((tmp_path / "config.json").read_text())
    for field in changes:
        raw["dflash_config"].pop(field, None)
    if "target_layer_ids" in changes:
        raw["target_layer_ids"] = changes["target_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = refusal(tmp_path)
    assert found.startswith("HERE: ")
    assert message in found


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "DFlash 2",
            lambda t: t.pop("layers.1.mlp_conv.base_kernel"),
            "tensor layers.1.mlp_conv.base_kernel is missing",
        ),
        (
            "DFlash 2",
            lambda t: [t.pop(key) for key in [*t] if "selector" in key],
            "tensors candidate_selector.* are missing",
        ),
        (
            "DFlash 2",
            lambda t: [t.pop(key) for key in [*t] if "_conv." in key],
            "tensors candidate_selector.* are there without *_conv.*; accepted: DFlash 2, which has both",
        ),
        (
            "DFlash 2",
            lambda t: t.update({"markov_head.markov_w1.weight": torch.zeros(211, 32)}),
            "tensors candidate_selector.* and markov_head.* are both there",
        ),
        (
            "DSpark",
            lambda t: t.update({"markov_head.markov_w3.weight": torch.zeros(3)}),
            "tensor markov_head.markov_w3.weight is not part of a 3-layer DSpark draft",
        ),
        ("DSpark", lambda t: t.pop("confidence_head.proj.bias"), "tensor confidence_head.proj.bias is missing"),
        (
            "DFlash 2",
            lambda t: t.update({"candidate_selector.extra": torch.zeros(3)}),
            "tensor candidate_selector.extra is not part of a 3-layer DFlash 2 draft",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, change, message):
    config = CORRECTED[name]
    save_draft(tmp_path, config, tensors_of(config), sliding_window=40, is_causal=False)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert message in refusal(tmp_path)


def test_a_confidence_head_alone_is_refused(tmp_path):
    config = CORRECTED["DSpark"]
    tensors = {name: tensor for name, tensor in tensors_of(config).items() if not name.startswith("markov")}
    save_draft(tmp_path, config, tensors, architectures=["DFlashDraftModel"])
    assert "tensors confidence_head.* are there without markov_head.*" in refusal(tmp_path)
