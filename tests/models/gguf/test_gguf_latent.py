"""Tests of the special features of GGUF files of models with compressed rows, and of Laguna."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gguf
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.open_checkpoint import Checkpoint
from tests.models import ggufs
from tests.models.checkpoints import LATENT, VARIANTS, YARN, rope, save_model
from tests.models.gguf.test_gguf_windowed import same
from tests.models.ggufs import write_gguf
from tests.models.windowed import FULL, LAGUNA, SLIDING


def save(folder: Path, variant: str) -> Path:
    model_type, how = VARIANTS[variant]
    save_model(folder, model_type, **how)
    return folder


def test_older_files_have_keys_and_values_in_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes of heads are those of a head's own keys and values."""
    folder = save(tmp_path / "m", "glm4_moe_lite")
    monkeypatch.setattr(ggufs, "split_keys_values", lambda *_: {})
    older = {
        "ARCH.attention.head_count_kv": LATENT["num_key_value_heads"],
        "ARCH.attention.key_length": 40,
        "ARCH.attention.value_length": 20,
        "ARCH.attention.key_length_mla": None,
        "ARCH.attention.value_length_mla": None,
    }
    path = write_gguf(tmp_path / "m.gguf", folder, **older)
    assert any(each.name == "blk.0.attn_kv_b.weight" for each in gguf.GGUFReader(path).tensors)
    same(Checkpoint.open(path), Checkpoint.open(folder))


@pytest.mark.parametrize("variant", ["glm4_moe_lite", "deepseek_v2, plain queries"])
def test_a_router_that_is_not_named_is_told_by_its_corrections(variant: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", variant)
    path = write_gguf(tmp_path / "m.gguf", folder, **{"ARCH.expert_gating_func": None})
    same(Checkpoint.open(path), Checkpoint.open(folder))


def test_a_prediction_head_is_the_layer_behind_the_last(tmp_path: Path) -> None:
    """It is one more layer, as the head of a published folder is."""
    folder = save(tmp_path / "m", "glm4_moe_lite")
    plain = write_gguf(tmp_path / "plain.gguf", folder)
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "deepseek2")
    layers = reader.fields["deepseek2.block_count"].contents()
    for field in reader.fields.values():
        if field.name.startswith("deepseek2.") and field.name != "deepseek2.block_count":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_block_count(layers + 1)
    writer.add_nextn_predict_layers(1)
    for each in reader.tensors:
        writer.add_tensor(each.name, each.data)
        if each.name.startswith(last := f"blk.{layers - 1}."):
            writer.add_tensor(each.name.replace(last, f"blk.{layers}."), each.data + 1)
    hidden = torch.ones(64).numpy()
    for part in ("enorm", "hnorm", "shared_head_norm"):
        writer.add_tensor(f"blk.{layers}.nextn.{part}.weight", hidden)
    writer.add_tensor(f"blk.{layers}.nextn.eh_proj.weight", torch.ones(64, 128).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, plain = Checkpoint.open(tmp_path / "m.gguf"), Checkpoint.open(folder)
    same(file, plain)
    head = HeadCheckpoint.open(file)
    assert head.config.layer == file.config
    for part in ("self_attn.kv_b_proj", "self_attn.q_b_proj", "mlp.experts.8.down_proj", "mlp.shared_expert.up_proj"):
        stored = plain.read(f"model.layers.{layers - 1}.{part}.weight")
        assert torch.equal(head.read(f"mtp.layers.0.{part}.weight"), stored + 1), part


def test_mistral_large_is_served_as_mistral_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are of the architecture of DeepSeek; its queries are scaled by position."""
    folder = save(tmp_path / "m", "mistral4")
    monkeypatch.setitem(ggufs.NAMES, "mistral4", "deepseek2")
    path = write_gguf(tmp_path / "m.gguf", folder, **{"ARCH.rope.scaling.yarn_log_multiplier": 0.1})
    file = Checkpoint.open(path)
    assert file.family.model_type == "mistral4"
    same(file, Checkpoint.open(folder))


def test_every_fourth_layer_of_laguna_sees_all_rows_where_nothing_is_said(tmp_path: Path) -> None:
    types = [SLIDING if layer % 4 else FULL for layer in range(6)]
    own = {"num_hidden_layers": 6, "layer_types": types, "num_attention_heads_per_layer": [4, 6, 2, 4, 4, 2]}
    dense = {"mlp_layer_types": ["dense"] + ["sparse"] * 5}
    save_model(tmp_path / "m", "laguna", **{**LAGUNA, **own, **dense})
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **{"ARCH.attention.sliding_window_pattern": None})
    same(Checkpoint.open(path), Checkpoint.open(tmp_path / "m"))


def test_published_files_of_laguna_do_not_scale_cosines(tmp_path: Path) -> None:
    """They say so, and then the factor of YaRN is not the one that its paper recommends."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 50000.0}
    rope = {**LAGUNA["rope_parameters"], FULL: {**scaled, "partial_rotary_factor": 0.5, "attention_factor": 1.0}}
    save_model(tmp_path / "m", "laguna", **{**LAGUNA, "rope_parameters": rope})
    said = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **{"ARCH.rope.scaling.yarn_attn_factor": 1.0})
    folder: Any = Checkpoint.open(tmp_path / "m").config
    file: Any = Checkpoint.open(said).config
    assert file == folder
    assert file.kinds[0].rotary.scaling.attention == 1.0


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_factor_of_cosines_is_read_as_the_file_gives_it(factor: float, tmp_path: Path) -> None:
    scaling = rope("yarn", **YARN, attention_factor=factor)
    save_model(tmp_path / "m", "llama", **{**VARIANTS["llama, yarn"][1], **scaling})
    said = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **{"ARCH.rope.scaling.yarn_attn_factor": factor})
    folder: Any = Checkpoint.open(tmp_path / "m").config
    file: Any = Checkpoint.open(said).config
    assert file.rope_scaling == folder.rope_scaling
    assert file.rope_scaling.attention == factor


WRONG = {
    "another router": ("glm4_moe_lite", {"ARCH.expert_gating_func": 3}, "deepseek2.expert_gating_func 3 is not"),
    "several key heads": ("glm4_moe_lite", {"ARCH.attention.head_count_kv": 2}, "deepseek2.attention.head_count_kv 2"),
    "weights that are normalised": (
        "deepseek_v2, plain queries",
        {"ARCH.expert_weights_norm": True},
        "norm_topk_prob true is not supported",
    ),
    "scaled from another position": (
        "mistral4",
        {"ARCH.attention.temperature_length": 64},
        "mistral4.attention.temperature_length 64 is not supported; accepted: 128",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_served_is_refused_by_name(case: str, tmp_path: Path) -> None:
    variant, fields, said = WRONG[case]
    path = write_gguf(tmp_path / "m.gguf", save(tmp_path / "m", variant), **fields)
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open(path)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_projections_of_another_shape_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "m", "glm4_moe_lite")
    right = ggufs.split_keys_values

    def swap(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        return {name: part.mT if "attn_k_b" in name else part for name, part in right(name, tensor, config).items()}

    monkeypatch.setattr(ggufs, "split_keys_values", swap)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k_b\.weight has shape \[4, 24, 32\]; accepted here"):
        Checkpoint.open(write_gguf(tmp_path / "m.gguf", folder))
