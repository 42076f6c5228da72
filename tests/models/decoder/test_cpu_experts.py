"""Experts that the host computes: the bits of its kernels, however rows come. The device is the host here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.expert_products import (
    list_expert_layers,
    list_expert_matrices,
    list_expert_products,
    list_host_tensors,
)
from adapters.models.decoder.family import family_of
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import GEOMETRIES, VARIANTS, proven, same_bits, tokens_of
from tests.models.families.test_hybrid_experts import OWN as HYBRID
from tests.models.windowed import WINDOWED
from tests.pairs import in_turns

FLOAT = torch.float32
BUCKETS = (4, 8, 16, 32)
SIZES = {"vocab_size": 160, "intermediate_size": 104, "num_hidden_layers": 3, "max_position_embeddings": 2048}
NAMES = (
    "qwen3_moe, some layers dense",
    "qwen3_moe, every other layer, tied",
    "glm4_moe, groups and norms",
    "minimax_m2",
    "gpt_oss",
    "gemma4, experts",
    "deepseek_v2, groups, yarn",
)


def config_of(name: str) -> DenseConfig:
    if name == "hybrid":
        return HYBRID
    model_type, settings = (VARIANTS | WINDOWED)[name]
    raw = {**SIZES, **GEOMETRIES["gqa 2 to 1"], "rope_theta": 1e4, "hidden_activation": "gelu_pytorch_tanh", **settings}
    found = family_of({"model_type": model_type}).parse(raw)
    assert isinstance(found, DenseConfig)
    return found


def shard_with(
    config: DenseConfig,
    kernels: Kernels,
    layers: range = range(0),
    *,
    host: CpuKernels | None = None,
    layouts: dict[str, StepLayout] | None = None,
    dtype: torch.dtype = FLOAT,
) -> DenseShard:
    """A shard whose layers `layers` have their experts on the host, where `host` computes them."""
    placement = ShardPlacement(slots=3, capacity=512, buckets=BUCKETS, dtype=dtype, state_checkpoints=1)
    weights = RandomWeights(config, scale=0.15, layouts=layouts or {})
    cpu_experts = None
    if layers:
        own = CpuKernels(dtype) if host is None else host
        cpu_experts = CpuExperts.prepare(layers, own, weights, config.hidden_size, placement)
    return DenseShard(config, weights, kernels, placement, cpu_experts=cpu_experts)


def prove_experts(config: DenseConfig, dtype: torch.dtype, layouts: dict[str, StepLayout] | None = None) -> CpuKernels:
    listed = list_expert_products(config, BUCKETS, threads=torch.get_num_threads(), layouts=layouts or {})
    kernels = CpuKernels(dtype)
    plan = kernels.prove(listed).plan
    assert plan is not None
    return kernels.with_plan(plan)


def run(shard: DenseShard, bucket: int, *parts: tuple[int, int, Tensor]) -> Tensor:
    """Logits of the rows of one step, all of which stay; parts are (slot, start, token ids)."""
    step = Step(tuple(Segment(slot, start, len(ids)) for slot, start, ids in parts), bucket)
    forward = shard.forward(step, torch.cat([ids for _, _, ids in parts]))
    found = shard.logits(step, forward.hidden)[: step.rows].clone()
    shard.commit(step, [len(ids) for _, _, ids in parts])
    return found


def run_in_pieces(shard: DenseShard, tokens: Tensor, pieces: list[tuple[int, int]], slot: int = 0) -> Tensor:
    """Logits of every row; pieces are (bucket, rows), the last one repeated."""
    found = list[Tensor]()
    at = 0
    while at < len(tokens):
        bucket, count = pieces[min(len(found), len(pieces) - 1)]
        found.append(run(shard, bucket, (slot, at, tokens[at : at + count])))
        at += count
    return torch.cat(found)


def logits_of(shard: DenseShard, tokens: Tensor) -> Tensor:
    """Logits of all rows, a chunk that decodes after the other."""
    return run_in_pieces(shard, tokens, [(32, 32)])


@pytest.mark.parametrize("name", [*NAMES, "hybrid"])
def test_the_same_kernels_give_the_same_bits_on_the_host(name: str) -> None:
    """Routers, corrections, scales, biases and shared experts of every family are those of layers on the device."""
    config = config_of(name)
    tokens = tokens_of(70)
    plain = shard_with(config, CpuKernels(FLOAT))
    found = shard_with(config, CpuKernels(FLOAT), range(config.num_layers))
    expected = logits_of(plain, tokens)
    assert expected.isfinite().all()
    assert same_bits(logits_of(found, tokens), expected)


@in_turns("name", "pieces", full=0)
@pytest.mark.parametrize("name", ["qwen3_moe, some layers dense", "glm4_moe, groups and norms", "hybrid"])
@pytest.mark.parametrize(
    "pieces", [[(16, 13), (4, 3), (8, 7)], [(32, 30), (4, 1)], [(4, 4), (32, 20), (16, 16)]], ids=str
)
def test_a_row_has_the_same_bits_in_any_pieces(name: str, pieces: list[tuple[int, int]]) -> None:
    """The device multiplies in other ways than the host: its products are those of oneDNN."""
    config = config_of(name)
    device = proven(config, FLOAT, 512, BUCKETS, own=False).copy_for_shard()
    shard = shard_with(config, device, range(2), host=prove_experts(config, FLOAT))
    tokens = tokens_of(60)
    expected = logits_of(shard, tokens)
    assert same_bits(run_in_pieces(shard, tokens, pieces, slot=1), expected)
    more = tokens_of(1, seed=8)
    both = run(shard, 16, (0, 60, more), (1, 60, more))
    assert same_bits(both[0], both[1])


def test_other_layers_on_the_host_round_otherwise() -> None:
    """So the placement has to be part of the identity."""
    config = config_of("qwen3_moe")
    tokens = tokens_of(40)
    found = [
        logits_of(shard_with(config, ReferenceKernels(), layers, host=prove_experts(config, FLOAT)), tokens)
        for layers in (range(0), range(1), range(3))
    ]
    for ours, theirs in ((0, 1), (0, 2), (1, 2)):
        assert not same_bits(found[ours], found[theirs])
        torch.testing.assert_close(found[ours], found[theirs], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        StepLayout("uint4", 32, per=8, inner=True, least="own"),
        StepLayout("int8", 32),
        StepLayout("uint4", 128, least="scale"),
    ],
    ids=["Q4_K", "Q8_0", "AWQ"],
)
def test_packed_experts_stay_packed_on_the_host(layout: StepLayout) -> None:
    dtype = torch.bfloat16
    raw = {**SIZES, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    own = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "rope_theta": 1e4}
    config = family_of({"model_type": "qwen3_moe"}).parse({**raw, **own})
    layouts = {name: layout for _, parts in list_expert_matrices(config) for name, _ in parts}
    host = prove_experts(config, dtype, layouts)
    device = proven(config, dtype, 512, BUCKETS, own=False).copy_for_shard()
    shard = shard_with(config, device, range(2), host=host, layouts=layouts, dtype=dtype)
    weights = 2 * 9 * 3 * 256 * 256
    router = 2 * 256 * 9 * 4
    assert shard.memory()["host"] <= weights * layout.bits / 8 + 2 * router
    tokens = tokens_of(40)
    expected = logits_of(shard, tokens)
    assert same_bits(run_in_pieces(shard, tokens, [(8, 5), (32, 32), (4, 2)], slot=1), expected)


def test_memory_is_that_of_the_host_and_is_given_back() -> None:
    config = config_of("glm4_moe, groups and norms")
    plain = shard_with(config, ReferenceKernels()).memory()
    shard = shard_with(config, ReferenceKernels(), range(1, 3))
    found = shard.memory()
    each = 3 * 40 * 64 * 4
    assert plain["weights"] - found["weights"] == 2 * (12 * each + 12 * 64 * 4 + 12 * 4), "a shared expert stays"
    assert found["host"] >= 2 * 12 * each
    assert plain["host"] == 0
    shard.close()
    assert shard.memory()["host"] == found["host"], "its memory is reported as before"


def test_a_step_that_stops_early_needs_no_experts_of_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("qwen3_moe")
    shard = shard_with(config, ReferenceKernels(), range(3))
    counted: list[int] = []
    own: Callable[..., Any] = CpuKernels.sum_experts

    def count(self: CpuKernels, *given: Any) -> tuple[Tensor, Tensor]:
        counted.append(1)
        return own(self, *given)

    monkeypatch.setattr(CpuKernels, "sum_experts", count)
    shard.forward(Step((Segment(0, 0, 8),), 8, rows_only=True), tokens_of(8))
    assert len(counted) == 2
    shard.forward(Step((Segment(0, 8, 8),), 8), tokens_of(8))
    assert len(counted) == 5


def test_pieces_between_the_experts_of_the_host_are_launched_one_by_one() -> None:
    launched: list[tuple[str, str]] = []

    class Recording(ReferenceKernels):
        def launch(self, name: str, batch: Any, body: Callable[[], Any], *, piece: str = "") -> Any:
            launched.append((name, piece))
            return body()

        def stop_recording(self) -> None:
            launched.append(("", "stopped"))

    shard = shard_with(config_of("qwen3_moe, some layers dense"), Recording(), range(3))
    shard.forward(Step((Segment(0, 0, 1),), 4), tokens_of(1))
    assert launched == [("layers", "to 1"), ("layers", "to 2"), ("layers", "")]
    launched.clear()
    shard_with(config_of("gemma4, experts"), Recording(), range(3)).forward(Step((Segment(0, 0, 1),), 4), tokens_of(1))
    assert ("", "stopped") in launched, "experts next to an MLP run inside a body, which cannot be recorded then"


# --- what is listed and proven ---


def test_layers_matrices_and_tensors_of_experts_are_found() -> None:
    config = config_of("qwen3_moe, some layers dense")
    assert list_expert_layers(config) == (1, 2)
    assert list_expert_layers(config_of("qwen3_moe, every other layer, tied")) == (1,)
    assert list_expert_layers(config_of("llama 3, tied")) == ()
    assert len(list(list_expert_matrices(config, range(2)))) == 2 * 9
    names = list_host_tensors(config, range(1, 2))
    assert len(names) == 3 * 9 + 1
    assert all(name.startswith("model.layers.1.mlp.") for name in names)
    shared = list_host_tensors(HYBRID, range(1))
    assert not [name for name in shared if "shared_expert." in name]
    assert [name for name in shared if "shared_expert_gate" in name]


def test_the_probe_proves_such_layers_and_names_what_computes_their_experts() -> None:
    config = config_of("glm4_moe, groups and norms")
    family = family_of({"model_type": "glm4_moe"})
    shape = ProbeShape(device=torch.device("cpu"), dtype=FLOAT, chunk=32, capacity=256, sizes=(4, 16))
    listed = list_expert_products(config, shape.buckets, threads=torch.get_num_threads())
    host = CpuKernels(FLOAT)
    host = host.with_plan(host.prove(listed).plan)
    device = CpuKernels(FLOAT, own=False)
    plain = probe(family, config, device, shape)
    found = probe(family, config, device, shape, experts=host, known=plain.plan)
    assert found.mode == plain.mode == "buckets"
    assert found.plan == plain.plan
    assert "experts on cpu" in found.numerics_class
    assert found.numerics_class != plain.numerics_class
    assert found.kernels == f"{device.name}, experts {host.name}"
