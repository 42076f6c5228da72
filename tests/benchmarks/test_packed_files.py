"""GGUF files of random blocks: their types, and the size of their weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from adapters.models.open_checkpoint import Checkpoint
from benchmarks.packed_files import BlockPools, choose_kind, write_file

LAYERS = 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q6_K", "Q8_0"])
def test_a_file_opens_and_its_weights_are_as_large_as_real_ones(mix: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / f"small-{mix}.gguf", "small", mix, LAYERS)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.config.num_layers == LAYERS
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(tensors) == len(checkpoint.tensors)
    for name, published in (("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"), ("output.weight", "lm_head")):
        weights = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert 0.015 < float(weights.std()) < 0.025
        assert abs(float(weights.mean())) < 0.002
        stored = checkpoint.read(published if published.endswith("weight") else "lm_head.weight").float().numpy()
        np.testing.assert_allclose(stored, weights, rtol=0.01, atol=1e-4)
    assert len(checkpoint.layouts) == 7 * LAYERS + 2


@pytest.mark.timeout(60)
def test_experts_of_a_layer_share_a_tensor_and_routers_are_not_packed(tmp_path: Path) -> None:
    path = write_file(tmp_path / "small-moe-Q4_K_M.gguf", "small-moe", "Q4_K_M")
    checkpoint = Checkpoint.open(path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    experts = checkpoint.config.experts
    assert experts is not None
    assert tensors["blk.1.ffn_up_exps.weight"].shape.tolist() == [256, experts.inner, experts.count]
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type is Kind.F32
    router = checkpoint.read("model.layers.1.mlp.gate.weight")
    expert = checkpoint.read("model.layers.1.mlp.experts.7.up_proj.weight")
    assert all(0.015 < float(weight.float().std()) < 0.025 for weight in (router, expert))
    assert not torch.equal(router, checkpoint.read("model.layers.2.mlp.gate.weight"))


def test_a_mix_has_the_types_that_llama_quantize_gives() -> None:
    assert choose_kind("Q4_K_M", "token_embd.weight", 36) is Kind.Q4_K
    assert choose_kind("Q4_K_M", "output.weight", 36) is Kind.Q6_K
    more = [layer for layer in range(36) if choose_kind("Q4_K_M", f"blk.{layer}.ffn_down.weight", 36) is Kind.Q6_K]
    assert more[:6] == [0, 1, 2, 3, 6, 9]
    assert len(more) == 18
    assert choose_kind("Q8_0", "blk.0.attn_v.weight", 36) is Kind.Q8_0


def test_tensors_of_one_type_share_blocks_and_a_type_without_scales_is_refused() -> None:
    pools = BlockPools()
    first, second = pools.take(Kind.Q4_K, (8, 512)), pools.take(Kind.Q4_K, (4, 512))
    assert first.shape == (8, 2 * 144)
    assert np.shares_memory(first, second)
    with pytest.raises(KeyError):
        pools.take(Kind.Q3_K, (1, 256))
