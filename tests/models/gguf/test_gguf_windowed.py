"""Tests of the special features of GGUF files of Gemma and gpt-oss: what they leave out, joint tensors, spare ones,
MXFP4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.metadata import read_metadata
from adapters.models.gguf.windowed_families import read_gemma3_settings
from adapters.models.open_checkpoint import Checkpoint
from gguf import GGMLQuantizationType as Kind
from tests.models.checkpoints import GEOMETRIES, save_model
from tests.models.families.test_gpt_oss import pack_experts
from tests.models.ggufs import packed, write_gguf
from tests.models.windowed import BESIDE, FULL, GEMMA3, GEMMA4, GPT_OSS, KEYS_AS_VALUES, SHARING, SLIDING

WIDE = {**GPT_OSS, "intermediate_size": 96}
SPARSE = {**GEMMA4, **KEYS_AS_VALUES, **BESIDE}


def same(file: Checkpoint, folder: Checkpoint) -> None:
    assert file.config == folder.config
    for name in folder.config.tensors():
        assert torch.equal(file.read(name), folder.read(name)), name


def repack(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Blocks as llama.cpp has them: the scale, and bytes of which each holds a number of either half."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    first, second = codes[..., :16], codes[..., 16:]
    return torch.cat((scales.unsqueeze(-1), first | second << 4), -1).flatten(-2).numpy()


def test_experts_in_mxfp4_are_those_of_the_folder(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "gpt_oss", **WIDE)
    pack_experts(tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")

    def pack(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
        if not name.endswith("_exps.weight"):
            return packed(name, data, kind)
        layer, part = name.split(".")[1], name.split("_")[1]
        module = f"model.layers.{layer}.mlp.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
        return repack(stored[f"{module}_blocks"][:, rows], stored[f"{module}_scales"][:, rows]), Kind.MXFP4

    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m", pack=pack))
    same(file, Checkpoint.open(tmp_path / "m"))
    assert "MXFP4" in file.packing_names


def test_every_sixth_layer_of_gemma_3_sees_all_rows_where_nothing_is_said(tmp_path: Path) -> None:
    types = [FULL if layer % 6 == 5 else SLIDING for layer in range(7)]
    save_model(tmp_path / "m", "gemma3_text", **{**GEMMA3, "layer_types": types, "num_hidden_layers": 7})
    left_out = {"ARCH.attention.sliding_window_pattern": None, "ARCH.rope.freq_base_swa": None}
    file = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tmp_path / "m", **left_out))
    assert file.config == Checkpoint.open(tmp_path / "m").config
    every_third = write_gguf(tmp_path / "3.gguf", tmp_path / "m", **{"ARCH.attention.sliding_window_pattern": 3})
    found: Any = Checkpoint.open(every_third).config
    assert [layer for layer, kind in enumerate(found.kinds) if not kind.traits.window] == [2, 5]


@pytest.mark.parametrize(("layers", "scalar"), [(48, 16), (62, 20)])
def test_the_largest_gemma_3_scales_queries_by_the_hidden_size(layers: int, scalar: int, tmp_path: Path) -> None:
    """It has 62 layers; the file does not say how queries are scaled."""
    save_model(tmp_path / "m", "gemma3_text", **{**GEMMA3, **GEOMETRIES["gqa 2 to 1"], "hidden_size": 80})
    said = {"ARCH.block_count": layers, "ARCH.attention.sliding_window_pattern": None}
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **said)
    assert read_gemma3_settings(read_metadata(path))["query_pre_attn_scalar"] == scalar


def test_experts_of_gemma_4_may_have_a_tensor_for_each_product(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "gemma4_text", **SPARSE)
    joint = write_gguf(tmp_path / "joint.gguf", tmp_path / "m")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(joint).tensors}
    writer = gguf.GGUFWriter(tmp_path / "apart.gguf", "gemma4")
    for field in gguf.GGUFReader(joint).fields.values():
        if field.name.startswith("gemma4."):
            value = field.contents()
            kinds = [gguf.GGUFValueType.ARRAY, field.types[-1]] if isinstance(value, list) else field.types
            writer.add_key_value(field.name, value, kinds[0], kinds[-1])
    for name, data in found.items():
        if "gate_up_exps" not in name:
            writer.add_tensor(name, data)
            continue
        gate, up = np.split(data, 2, axis=1)
        writer.add_tensor(name.replace("gate_up", "gate"), gate)
        writer.add_tensor(name.replace("gate_up", "up"), up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    same(Checkpoint.open(tmp_path / "apart.gguf"), Checkpoint.open(tmp_path / "m"))


def test_keys_of_layers_that_read_those_of_others_may_be_there(tmp_path: Path) -> None:
    """Published checkpoints have them, and the converter writes them, too."""
    save_model(tmp_path / "m", "gemma4_text", **{**GEMMA4, **SHARING})
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors |= {
        f"model.layers.{layer}.self_attn.{part}": tensors[f"model.layers.{layer - 2}.self_attn.{part}"] + 1
        for layer in (4, 5)
        for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    }
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    more = write_gguf(tmp_path / "more.gguf", tmp_path / "m", spare=True)
    assert more.stat().st_size > plain.stat().st_size
    same(Checkpoint.open(more), Checkpoint.open(tmp_path / "m"))


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no frequencies": ("gemma4_text", SPARSE, {"rope_freqs": None}, "rope_freqs.weight is missing"),
    "frequencies of another kind": (
        "gemma4_text",
        SPARSE,
        {"rope_freqs": np.full(16, 2.0, np.float32)},
        "rope_freqs.weight has other numbers than 1 and then 1e30",
    ),
    "heads that differ": (
        "gemma4_text",
        SPARSE,
        {"ARCH.attention.head_count_kv": [1, 2, 1, 1]},
        "head_count_kv differs between layers of one kind",
    ),
    "heads of some layers": (
        "gemma4_text",
        SPARSE,
        {"ARCH.attention.head_count_kv": [2, 2]},
        "gemma4.attention.head_count_kv has 2 entries; accepted: 4",
    ),
    "widths that differ": (
        "gemma4_text",
        SPARSE,
        {"ARCH.feed_forward_length": [104, 104, 104, 208]},
        "feed_forward_length is not the same, or double for layers that share rows",
    ),
    "part of a head": (
        "gemma4_text",
        SPARSE,
        {"ARCH.rope.dimension_count_swa": 8},
        "gemma4.rope.dimension_count_swa 8 is not supported; accepted: 16",
    ),
    "windows alone": (
        "gemma3_text",
        GEMMA3,
        {"ARCH.attention.sliding_window_pattern": [True] * 3},
        "no layer of layer_types is 'full_attention'",
    ),
    "windows of numbers": (
        "gemma3_text",
        GEMMA3,
        {"ARCH.attention.sliding_window_pattern": [1, 0, 1]},
        "gemma3.attention.sliding_window_pattern is not a list of flags",
    ),
    "experts chosen otherwise": (
        "gpt_oss",
        WIDE,
        {"ARCH.expert_gating_func": 2},
        "gpt-oss.expert_gating_func 2 is not supported; accepted: 3",
    ),
    "biases of too few experts": (
        "gpt_oss",
        WIDE,
        {"ARCH.expert_count": 8},
        "blk.0.ffn_gate_inp.weight has shape [9, 64]; accepted here: [8, 64]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_served_is_refused_by_name(case: str, tmp_path: Path) -> None:
    family, how, fields, said = WRONG[case]
    save_model(tmp_path / "m", family, **how)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "m", **fields)
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open(path)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
