"""Checkpoints of Laguna: what is read of their configuration, and what is refused of it."""

from __future__ import annotations

import json
import re

import pytest
import torch

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.config.rope import Yarn
from adapters.models.decoder.family import family_of
from adapters.models.families.laguna import LagunaConfig
from adapters.models.kernels.activations import gate_by_softplus
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Segment, Step
from tests.models.checkpoints import save_model, shard_of, tokens_of
from tests.models.windowed import FULL, LAGUNA, LAGUNA_YARN, SLIDING, read_config


def test_layers_have_heads_windows_and_rotation_of_their_own():
    config = read_config("laguna, mqa, yarn, wide gates")
    assert isinstance(config, LagunaConfig)
    assert [config.shape_of(layer).num_heads for layer in range(4)] == [5, 3, 5, 1]
    assert [config.shape_of(layer).traits.window for layer in range(4)] == [0, 48, 48, 0]
    assert [config.shape_of(layer).experts is None for layer in range(4)] == [False, True, False, False]
    assert {config.shape_of(layer).traits.gates for layer in range(4)} == {config.head_dim}
    full, sliding = config.shape_of(0).rotary, config.shape_of(1).rotary
    assert (full.head_dim, sliding.head_dim) == (8, 16)
    assert isinstance(full.scaling, Yarn)
    assert sliding.scaling is None
    assert len(config.list_probed_layers()) == 4, "no two layers are alike in all of this"


def test_a_file_may_leave_out_what_transformers_has_by_default():
    raw = {name: value for name, value in LAGUNA.items() if name not in ("rope_parameters", "layer_types")}
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 104, "max_position_embeddings": 4096}
    own = {**sizes, **raw, "num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "laguna"}
    config = family_of(own).parse(own)
    assert isinstance(config, LagunaConfig)
    assert config.head_dim == 128
    assert not any(kind.traits.window for kind in config.kinds)
    assert {(kind.rotary.head_dim, kind.rotary.theta) for kind in config.kinds} == {(64, 500_000.0)}


@pytest.mark.parametrize("count", [1, 16])
def test_a_gate_is_a_softplus_of_each_head_or_each_number(count):
    x = torch.randn(5, 3 * 16, generator=make_generator(1))
    gates = torch.randn(5, 3 * count, generator=make_generator(2)) * 20
    expected = x.view(5, 3, 16) * torch.log1p(gates.double().exp()).view(5, 3, count)
    torch.testing.assert_close(gate_by_softplus(x, gates, count), expected.flatten(1).float(), rtol=1e-5, atol=1e-6)
    for row in range(5):
        alone = gate_by_softplus(x[row : row + 1], gates[row : row + 1], count)
        assert torch.equal(alone[0], gate_by_softplus(x, gates, count)[row])


def test_layers_split_over_two_shards_give_the_bits_of_one(tmp_path):
    save_model(tmp_path, "laguna", **LAGUNA_YARN)
    tokens = tokens_of(60)
    whole, front, back = (shard_of(tmp_path, layers=layers) for layers in (range(4), range(2), range(2, 4)))
    step = Step((Segment(0, 0, 60),), 64)
    expected = whole.logits(step, whole.forward(step, tokens).hidden)
    found = back.logits(step, back.forward(step, front.forward(step, tokens).hidden).hidden)
    assert torch.equal(found[:60], expected[:60])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gating": False}, "gating False is not supported; accepted: True, 'per-head', 'per-element'"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping 30.0 is not supported; accepted: 0"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input true is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer is not a list of 4 numbers"),
        ({"num_attention_heads_per_layer": [4, 6, 3, 4]}, "3 of num_attention_heads_per_layer is not a multiple"),
        ({"mlp_layer_types": ["dense"]}, "is not a list of 4 kinds of feed-forwards; accepted: 'dense', 'sparse'"),
        ({"layer_types": [SLIDING] * 4}, f"no layer of layer_types is '{FULL}'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, changes, said):
    save_model(tmp_path, "laguna", **LAGUNA)
    settings = json.loads((tmp_path / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=re.escape(said)):
        family_of(settings).parse(settings)
