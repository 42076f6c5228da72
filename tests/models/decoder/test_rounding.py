"""Weights rounded at load: to what a naive search says, and no others; the error is what it is said to be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.quantised.rounding import GROUP, WIDTHS, round_rows
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.open_checkpoint import DECIDING, Checkpoint
from tests.examples import count_examples
from tests.models.checkpoints import EXPERTS, run_in_pieces, save_model, tokens_of
from tests.models.gguf.test_gguf_models import WIDE, WIDE_FAMILIES
from tests.models.quantised import quantise


def numbers(rows: Tensor, bits: int) -> Tensor:
    return round_rows(rows, bits).unpack(torch.float32)[:, : rows.shape[1]]


def in_bfloat16(value: float) -> np.float32:
    return np.float32(torch.tensor(max(value, 1e-30)).bfloat16().item())


def naive(row: list[float], bits: int) -> list[float]:
    """One group, number by number."""
    found, least = list[np.float32](), math.inf
    numbers = [np.float32(number) for number in row]
    low, high = min(*numbers, np.float32(0)), max(*numbers, np.float32(0))
    for width in WIDTHS if bits == 4 else (None,):
        if width is None:
            scale, zero, bottom, top = in_bfloat16(max(-low, high) / np.float32(127)), np.float32(0), -127, 127
        else:
            scale, bottom, top = in_bfloat16((high - low) * np.float32(width / 15)), 0, 15
            zero = np.float32(min(max(np.rint(low * np.float32(-width) / scale), 0), 15))
        steps = [min(max(np.rint(number / scale + zero), bottom), top) for number in numbers]
        values = [np.float32(step - zero) * scale for step in steps]
        error = sum((float(value) - float(number)) ** 2 for value, number in zip(values, numbers, strict=True))
        if error < least:
            found, least = values, error
    return [float(value) for value in found]


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_become_what_a_naive_search_finds(bits: int) -> None:
    torch.manual_seed(bits)
    rows = torch.randn(6, 2 * GROUP + 40) * torch.tensor([[1e-3], [0.02], [1], [1], [30], [1e-6]])
    rows[2] = rows[2].abs()
    rows[3] = 0
    rows[4, 7] = 900.0
    found = numbers(rows, bits)
    for row, values in zip(rows, found, strict=True):
        for start in range(0, len(row), GROUP):
            assert values[start : start + GROUP].tolist() == naive(row[start : start + GROUP].tolist(), bits)


@settings(max_examples=count_examples(60), deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300), st.sampled_from([8, 4]))
def test_no_number_is_further_off_than_the_width_of_its_group_allows(row: list[float], bits: int) -> None:
    weight = torch.tensor([row])
    found = numbers(weight, bits)
    assert found.shape == weight.shape
    assert found.isfinite().all()
    for start in range(0, len(row), GROUP):
        group = weight[0, start : start + GROUP]
        width = group.clamp(min=0).max() - group.clamp(max=0).min()
        furthest = (found[0, start : start + GROUP] - group).abs().max()
        assert furthest <= width * (0.25 if bits == 4 else 0.01) + 1e-29


def rounded_by_hand(checkpoint: Checkpoint, name: str, bits: int) -> Tensor:
    return numbers(checkpoint.read(name).float(), bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_of_layers_are_rounded_and_nothing_else(bits: int) -> None:
    plain = Checkpoint.open(demo.FOLDERS["demo-hybrid"])
    found = plain.with_quantisation(bits)
    assert found.rounding_error is None, "nothing has been read"
    changed = there = 0.0
    for name, entry in found.with_dtype(torch.bfloat16).tensors.items():
        own = plain.read(name)
        if entry.packing_name:
            expected = rounded_by_hand(plain, name, bits)
            assert torch.equal(entry.read(name), expected.bfloat16())
            changed += float((expected - own.float()).double().square().sum())
            there += float(own.double().square().sum())
        else:
            assert torch.equal(entry.read(name), own)
        kind = name.split(".")[-2]
        matrix = own.ndim == 2 and name.startswith("model.layers.") and kind not in {"in_proj_a", "in_proj_b"}
        assert (entry.packing_name != "") == matrix, name
    assert found.rounding_error == pytest.approx(math.sqrt(changed / there), rel=1e-4)
    assert (0.005 < found.rounding_error < 0.01) if bits == 8 else (0.05 < found.rounding_error < 0.12)
    assert bits < found.stored_bits < plain.stored_bits


def test_experts_are_rounded_and_what_chooses_them_is_not(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **{**EXPERTS, "hidden_size": 128, "moe_intermediate_size": 128})
    forms = {name: entry.packing_name for name, entry in Checkpoint.open(tmp_path).with_quantisation(4).tensors.items()}
    assert forms["model.layers.0.mlp.experts.3.down_proj.weight"] != ""
    assert forms["model.layers.0.mlp.gate.weight"] == forms["model.embed_tokens.weight"] == ""


def test_logits_are_those_of_transformers_with_the_rounded_weights(tmp_path: Path) -> None:
    oracle: Any = save_model(tmp_path, "qwen3", **WIDE)
    checkpoint = Checkpoint.open(tmp_path).with_quantisation(4)
    shard = DenseShard(checkpoint.config, checkpoint, CpuKernels(torch.float32), ShardPlacement(slots=1, capacity=64))
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if checkpoint.tensors[name].packing_name:
                weight.copy_(numbers(weight, 4))
        expected = oracle(tokens_of(50)[None]).logits[0]
    # packed: steps and what is subtracted of them are added up apart, and cancel
    torch.testing.assert_close(run_in_pieces(shard, tokens_of(50), [(64, 50)]), expected, rtol=1e-5, atol=1e-4)


def test_what_is_packed_is_not_rounded_again(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "qwen3", **WIDE)
    quantise(tmp_path / "m", tmp_path / "packed", "awq")
    with pytest.raises(CheckpointError, match="--quantize int4: its weights are packed already"):
        Checkpoint.open(tmp_path / "packed").with_quantisation(4)


@frozen
class UnpackedWeights:
    """The rounded weights of a checkpoint as plain numbers."""

    checkpoint: Checkpoint

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name)


USUAL = ("gemma4_text", "gpt_oss", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    "family", [one if one in USUAL else pytest.param(one, marks=pytest.mark.long) for one in WIDE_FAMILIES]
)
def test_matrices_of_every_family_are_rounded_and_their_routers_are_not(
    family: str, bits: Literal[4, 8], tmp_path: Path
) -> None:
    save_model(tmp_path / "m", family, **WIDE_FAMILIES[family])
    plain = Checkpoint.open(tmp_path / "m")
    rounded = plain.with_quantisation(bits)
    changed = {name for name in plain.tensors if not torch.equal(plain.read(name), rounded.read(name))}
    sizes = {name: shape for name, shape in plain.config.tensors().items() if len(shape) == 2 and ".layers." in name}
    matrices = {name for name, shape in sizes.items() if shape[1] >= GROUP and name.split(".")[-2] not in DECIDING}
    assert changed == matrices
    error = rounded.rounding_error or 0
    assert 0.004 < error < 0.02 if bits == 8 else 0.05 < error < 0.2
    packed, unpacked = (
        DenseShard(plain.config, weights, CpuKernels(torch.float32), ShardPlacement(slots=1, capacity=64))
        for weights in (rounded, UnpackedWeights(rounded.with_dtype(torch.float32)))
    )
    found, expected = (run_in_pieces(shard, tokens_of(50), [(64, 50)]) for shard in (packed, unpacked))
    # Of most rows: of some the router chooses another expert, which is a step in the error.
    assert (found - expected).abs().amax(1).median() <= 1e-4 * expected.abs().max()
