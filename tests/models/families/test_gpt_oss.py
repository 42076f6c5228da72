"""Checkpoints of gpt-oss as published, with experts in MXFP4, and what is refused of them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint.arranged_tensor import FOUR_BITS, unpack_mxfp4
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.packed_matrix import MXFP4
from adapters.models.decoder.family import family_of
from adapters.models.kernels.activations import CLAMPED, apply_gate
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import save_model, shard_of, tokens_of
from tests.models.hybrids import advance
from tests.models.windowed import GPT_OSS

WIDE = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96}


def pack_experts(folder) -> dict[str, torch.Tensor]:
    """Replace the experts by random ones in MXFP4. Return what they stand for, as transformers stores it."""
    tensors = load_file(folder / "model.safetensors")
    generator, plain = torch.Generator().manual_seed(3), {}
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (count, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(3).long()
        numbers = torch.tensor(FOUR_BITS)[codes] * 2.0 ** (scales.float() - 127).unsqueeze(-1)
        plain[name] = numbers.flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return plain


def test_experts_in_mxfp4_are_the_model_that_they_stand_for(tmp_path):
    oracle = save_model(tmp_path, "gpt_oss", **WIDE)
    plain = pack_experts(tmp_path)
    with torch.no_grad():
        for name, tensor in plain.items():
            oracle.get_parameter(name).copy_(tensor)
        tokens = tokens_of(100)
        expected = oracle(tokens[None]).logits[0]
    torch.testing.assert_close(advance(shard_of(tmp_path), tokens, [64]), expected, rtol=1e-5, atol=2e-4)
    opened = Checkpoint.open(tmp_path)
    assert "mxfp4" in opened.packing_names
    packed = [name for name, layout in opened.layouts.items() if layout == MXFP4]
    assert len(packed) == sum(".experts." in name and name.endswith("weight") for name in opened.tensors)
    for name in packed[:4]:
        assert torch.equal(opened.read_packed(name).unpack(torch.bfloat16), opened.read(name)), name
    assert not any(".experts." in name for name in opened.with_unpacked_experts().layouts)
    stacked = plain["model.layers.1.mlp.experts.gate_up_proj"]
    up = opened.tensors["model.layers.1.mlp.experts.4.up_proj.weight"].with_dtype(torch.float32)
    assert torch.equal(up.read("up").float(), stacked[4].T[1::2]), "every number is exact"


def test_every_code_of_mxfp4_is_exact_at_every_scale_of_real_files():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(200, -1, -1)
    scales = torch.arange(20, 220, dtype=torch.uint8).view(200, 1).expand(-1, 16)
    found = unpack_mxfp4(codes, scales).double().view(200, 16, 16, 2)
    table = torch.tensor(FOUR_BITS, dtype=torch.float64)
    power = 2.0 ** (torch.arange(20, 220).double() - 127).view(200, 1, 1)
    assert torch.equal(found[..., 0], table[(codes & 15).long()] * power)
    assert torch.equal(found[..., 1], table[(codes >> 4).long()] * power)


def test_a_gate_is_clamped_on_one_side_and_what_it_lets_through_on_both():
    gate, up = torch.tensor([[9.0, -20.0, 1.0]]), torch.tensor([[9.0, -9.0, 0.5]])
    clamped = torch.tensor([[7.0, -20.0, 1.0]])
    expected = clamped * torch.sigmoid(1.702 * clamped) * (torch.tensor([[7.0, -7.0, 0.5]]) + 1)
    torch.testing.assert_close(apply_gate(CLAMPED, gate, up), expected)


@pytest.mark.parametrize("part", ["scales", "blocks"])
def test_blocks_and_scales_that_do_not_fit_are_refused(tmp_path, part):
    save_model(tmp_path, "gpt_oss", **WIDE)
    pack_experts(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.experts.down_proj_{part}"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj has no blocks of 16 bytes"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": False}, "attention_bias false is not supported; accepted: true"),
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported; accepted: 7.0"),
        ({"sliding_window": "x"}, "is not an integer"),
        ({"layer_types": ["full_attention"]}, "layer_types is not a list of 3 kinds of layers"),
        ({"num_local_experts": None}, "num_experts is missing"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, changes, said):
    save_model(tmp_path, "gpt_oss", **GPT_OSS)
    settings = json.loads((tmp_path / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=re.escape(said)):
        family_of(settings).parse(settings)
