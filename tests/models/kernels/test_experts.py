"""Feed-forwards of experts: who goes where, in which layouts they are read, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_moe import FAMILY, Qwen3MoeConfig, parse
from adapters.models.kernels.cpu import experts as cpu_experts
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import (
    Experts,
    ExpertsShape,
    GatedWeights,
    SigmoidExpertsShape,
    choose_experts,
)
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import Checkpoint
from tests.child_code import check_interpreted
from tests.models.checkpoints import (
    EXPERTS,
    proven,
    run,
    run_in_pieces,
    same_bits,
    save_model,
    shard_of,
    tokens_of,
)

SHAPE = ExpertsShape(11, 3, 72, is_normalized=True)
CONFIG = Qwen3MoeConfig(203, 100, 212, 2, 6, 2, 24, 2048, 1e6, experts=SHAPE, dense_layers=(0,))
CPU = torch.device("cpu")


# --- choosing ---


def test_the_most_wanted_come_first_and_of_equals_the_lower_number():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, -0.0, 0.0], [0.0, -0.0, -5.0, 0.0, -torch.inf, -7.0]])
    chosen, weights = choose_experts(logits, ExpertsShape(6, 4, 8, is_normalized=False))
    assert chosen.tolist() == [[1, 2, 3, 0], [0, 1, 3, 2]]
    torch.testing.assert_close(weights, logits.softmax(1).gather(1, chosen))


def test_weights_add_up_to_one_only_where_the_family_says_so():
    logits = torch.randn(5, 70, generator=make_generator(1))
    shape = ExpertsShape(70, 8, 8, is_normalized=True)
    chosen, weights = choose_experts(logits, shape)
    assert torch.equal(chosen, logits.topk(8).indices)
    torch.testing.assert_close(weights, logits.topk(8).values.softmax(1))
    _, bare = choose_experts(logits, evolve(shape, is_normalized=False))
    assert bare.sum(1).max() < 0.9


def test_sigmoids_choose_with_a_correction_and_weigh_without_it():
    shape = SigmoidExpertsShape(4, 2, 8, is_normalized=True, factor=2.0)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    chosen, weights = choose_experts(logits, shape, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert chosen.tolist() == [[0, 1]]
    scores = logits.sigmoid()[0, :2]
    torch.testing.assert_close(weights[0], 2 * scores / scores.sum())


def test_experts_come_from_the_groups_whose_two_best_have_the_greatest_sum():
    shape = SigmoidExpertsShape(6, 2, 8, is_normalized=False, groups=3, chosen_groups=1)
    chosen, _ = choose_experts(torch.tensor([[9.0, -9.0, 1.0, 1.0, 2.0, -9.0]]), shape)
    assert chosen.tolist() == [[2, 3]], "of equal logits the lower number, and never the greatest one of all"


def test_a_row_chooses_by_sigmoids_the_same_in_any_company():
    logits = torch.randn(64, 128, generator=make_generator(2)).bfloat16().float()
    correction = torch.randn(128, generator=make_generator(3))
    shape = SigmoidExpertsShape(128, 8, 8, is_normalized=True, groups=8, chosen_groups=3, factor=2.5)
    chosen, weights = choose_experts(logits, shape, correction)
    for row in range(64):
        alone, own = choose_experts(logits[row : row + 1], shape, correction)
        assert torch.equal(alone[0], chosen[row])
        assert same_bits(own[0], weights[row])
    assert all(len({one // 16 for one in row}) <= 3 for row in chosen.tolist())


def test_a_row_chooses_the_same_in_any_company():
    logits = torch.randn(64, 130, generator=make_generator(2)).bfloat16().float()
    logits[7], logits[9, 3] = torch.nan, torch.nan
    shape = ExpertsShape(130, 8, 8, is_normalized=True)
    chosen, weights = choose_experts(logits, shape)
    for row in range(64):
        alone, own = choose_experts(logits[row : row + 1], shape)
        assert torch.equal(alone[0], chosen[row])
        assert same_bits(own[0], weights[row])
    assert all(len(set(one)) == 8 for one in chosen.tolist())


# --- computing ---


class AskedExperts(Sequence[GatedWeights]):
    """Gives the weights of experts, and remembers of which."""

    def __init__(self, each: Sequence[GatedWeights]) -> None:
        self.each, self.numbers = each, list[int]()

    def __getitem__(self, number):
        self.numbers.append(number)
        return self.each[number]

    def __len__(self) -> int:
        return len(self.each)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def layer(request) -> tuple[CpuKernels, Experts, Tensor]:
    """Kernels, a feed-forward with a shared expert, and 256 rows for it."""
    dtype, shape = request.param, evolve(SHAPE, shared=40)
    config, generator = evolve(CONFIG, experts=shape), make_generator(3)
    kernels = proven(config, dtype, 256).copy_for_shard()

    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator).to(dtype) * inputs**-0.5

    def gated(inner: int) -> GatedWeights:
        return GatedWeights(kernels.pack_gated(weight(2 * inner, 100)), kernels.pack(weight(100, inner)))

    each = tuple(gated(shape.inner) for _ in range(shape.count))
    experts = Experts(shape, kernels.pack(weight(shape.router_outputs, 100)), each, gated(shape.shared))
    return kernels, experts, torch.randn(256, 100, generator=generator).to(dtype)


def batch_of(bucket: int, rows: int) -> Batch:
    batch = Batch(bucket, CPU)
    batch.load(Step((Segment(0, 0, rows),), bucket), None)
    return batch


def fed(kernels: CpuKernels, experts: Experts, x: Tensor, bucket: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, 0, 0, bucket - len(x)), value=0.5)
    return kernels.experts(padded, experts, batch_of(bucket, len(x)))[: len(x)]


def test_a_row_has_the_same_bits_wherever_its_neighbours_go(layer):
    kernels, experts, x = layer
    whole = fed(kernels, experts, x, 256)
    for bucket, at, count in ((4, 9, 1), (4, 100, 4), (16, 50, 13), (64, 0, 33), (256, 3, 130)):
        assert same_bits(fed(kernels, experts, x[at : at + count], bucket), whole[at : at + count])
    for others in (x[9].expand(60, -1), torch.full((60, 100), torch.nan, dtype=x.dtype), torch.zeros(60, 100).to(x)):
        assert same_bits(fed(kernels, experts, torch.cat((others[:31], x[9:10], others[31:])), 64)[31], whole[9])


def test_only_experts_of_real_rows_are_asked_for_once_and_in_order(layer):
    kernels, experts, x = layer
    asked = AskedExperts(experts.each)
    seen = evolve(experts, each=asked)
    fed(kernels, seen, x[:1], 64)
    assert len(asked.numbers) == SHAPE.chosen, "and none for the 63 rows that are not there"
    asked.numbers.clear()
    fed(kernels, seen, x, 256)
    assert asked.numbers == [*range(SHAPE.count)]


def test_it_is_the_sum_of_what_each_expert_makes(layer):
    kernels, experts, x = layer
    logits = kernels.linear(x, experts.router).float()
    expected = torch.zeros(x.shape)
    chosen, weights = choose_experts(logits[:, : SHAPE.count].contiguous(), SHAPE)
    for number, one in enumerate(experts.each):
        made = kernels.linear(kernels.gated_linear(x, one.gate_up), one.down)
        expected += made * (weights * (chosen == number)).sum(1, keepdim=True)
    shared = kernels.linear(kernels.gated_linear(x, experts.shared.gate_up), experts.shared.down)
    expected += shared * logits[:, SHAPE.count :].sigmoid()
    error = (fed(kernels, experts, x, 256).float() - expected).abs().max()
    assert error <= 4 * torch.finfo(x.dtype).eps * expected.abs().max()


def test_rows_that_are_no_numbers_stay_in_their_slot():
    kernels = proven(CONFIG, torch.float32, 256).copy_for_shard()
    weights = RandomWeights(CONFIG, scale=0.1)
    shard, tokens = DenseShard(CONFIG, weights, kernels, ShardPlacement(slots=2, capacity=256)), tokens_of(200, 203)
    expected = run_in_pieces(shard, tokens, [(256, 200)])
    rows = shard.rows.export(0, 0, 200)
    shard.rows.import_(1, 0, {name: torch.full_like(one, torch.nan) for name, one in rows.items()})
    found = run(shard, 8, (1, 100, tokens[:3]), (0, 195, tokens[195:]))
    assert found[:3].isnan().any()
    assert same_bits(found[3:], expected[195:])


# --- what is proven ---


def probed(config: Qwen3MoeConfig, dtype: torch.dtype = torch.float32):
    return probe(
        FAMILY, config, CpuKernels(dtype), ProbeShape(device=CPU, dtype=dtype, chunk=64, capacity=256, sizes=(4, 16))
    )


def test_both_kinds_of_layers_are_probed_and_every_product_of_experts_is_listed():
    found = probed(CONFIG)
    assert (found.mode, found.buckets) == ("buckets", (4, 16, 64))
    assert found.numerics_class.count("-") >= 1, "of a layer of experts and a dense one"
    assert [config.experts.count for config, _ in CONFIG.list_probed_layers()] == [6, 6]
    assert [config.dense_layers for config, _ in CONFIG.list_probed_layers()] == [(0,), ()]
    shown = " ".join(found.plan.describe_lines())
    for product in ("100 to 11:", "100 to 6:", "100 to 72, gated:", "72 to 100:", "100 to 212, gated:"):
        assert product in shown


def test_the_probe_notices_sums_that_depend_on_how_many_rows_there_are(monkeypatch):
    def careless(*given: Any) -> tuple[Tensor, Tensor]:
        chosen, weights = choose(*given)
        return chosen, weights.nextafter(torch.ones(())) if len(weights) > 16 else weights

    choose = cpu_experts.choose_experts
    monkeypatch.setattr(cpu_experts, "choose_experts", careless)
    assert probed(evolve(CONFIG, dense_layers=())).mode == "grid"


def test_weights_that_rows_go_past_count_for_memory_and_not_for_threads():
    """11 experts of which 3 are multiplied with: what is to be kept in float32 is all of them."""

    def listed(memory: int):
        return CONFIG.products((4, 64), capacity=256, dtype=torch.bfloat16, threads=2, memory=memory)

    active = sum(one.outputs * one.inputs * (2 if one.gated else 1) for one in CONFIG.layer_products(1))
    everything = sum(torch.Size(shape).numel() for shape in CONFIG.layer_tensors(1).values() if len(shape) > 1)
    router = 100 * 6  # the probe's
    assert everything - active + router == 8 * 3 * 72 * 100
    dense = sum(torch.Size(shape).numel() for shape in CONFIG.layer_tensors(0).values() if len(shape) > 1)
    least = 4 * (everything + router + dense + 203 * 100)
    assert (listed(least).wider, listed(least - 1).wider) == (True, False)


# --- checkpoints ---


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path, "qwen3_moe", **EXPERTS, mlp_only_layers=[1])
    return tmp_path


def stack(folder) -> None:
    """Change a folder to the form in which `transformers` holds experts and newer checkpoints are published: one tensor
    for all.
    """
    tensors = load_file(folder / "model.safetensors")
    each: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        prefix, number, part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name).groups()
        each.setdefault(prefix, {}).setdefault(int(number), {})[part] = tensors.pop(name)
    for prefix, found in each.items():
        ordered = [found[number] for number in range(len(found))]
        both = [torch.cat((one["gate_proj"], one["up_proj"])) for one in ordered]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}.down_proj"] = torch.stack([one["down_proj"] for one in ordered])
    save_file(tensors, folder / "model.safetensors")


def test_experts_in_one_tensor_are_those_that_each_has_one(folder):
    tokens = tokens_of(40)
    expected, names = run_in_pieces(shard_of(folder), tokens, [(64, 40)]), {*Checkpoint.open(folder).tensors}
    assert "model.layers.0.mlp.experts.8.up_proj.weight" in names
    stack(folder)
    assert {*Checkpoint.open(folder).tensors} == names
    assert same_bits(run_in_pieces(shard_of(folder), tokens, [(64, 40)]), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_local_experts": 0}, "num_experts 0 is not an integer in 1..1024"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"num_experts": 2}, "num_experts_per_tok 3 is more than num_experts, 2"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size 'x' is not an integer"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1 is not true or false"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is not a list of numbers of layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers is not a list of numbers of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0 is not an integer in 1..512"),
        ({"num_experts": 1024, "num_hidden_layers": 65}, "1024 experts in each of 65 layers; accepted: 65536 in all"),
    ],
)
def test_what_is_not_served_is_refused_by_name(folder, changes, said):
    raw = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=re.escape(said)):
        parse(raw)


def test_layers_without_experts_are_those_that_are_named_and_all_but_every_so_many(folder):
    raw = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 7}
    assert parse(raw).dense_layers == (1,)
    assert parse(raw | {"mlp_only_layers": [], "decoder_sparse_step": 3}).dense_layers == (0, 1, 3, 4, 6)
    assert parse(raw | {"mlp_only_layers": [5, 90], "decoder_sparse_step": 2}).dense_layers == (0, 2, 4, 5, 6)
    assert parse(raw | {"mlp_only_layers": None}).dense_layers == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gate_up_proj": (9, 80, 63)}, r"experts.0.gate_proj.weight has shape \[40, 63\]; accepted here: \[40, 64\]"),
        ({"gate_up_proj": (8, 80, 64)}, r"experts.8.gate_proj.weight is missing"),
        ({"gate_up_proj": (9, 81, 64)}, r"experts.0.gate_proj.weight is missing"),
        ({"gate_up_proj": (1 << 30, 0, 64)}, r"experts.0.gate_proj.weight is missing"),
        ({"down_proj": (10, 64, 40)}, r"experts.9.down_proj.weight is not part of a 3-layer qwen3_moe"),
        ({"down_proj": (9 * 64, 40)}, r"experts.0.down_proj.weight is missing"),
    ],
)
def test_experts_in_one_tensor_of_another_shape_are_refused_by_name(folder, wrong, said):
    stack(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.experts.{part}": torch.zeros(shape) for part, shape in wrong.items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(folder)


def test_an_expert_that_is_there_twice_is_refused(folder):
    plain = load_file(folder / "model.safetensors")
    stack(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.4.down_proj.weight"
    save_file(tensors | {name: plain[name]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is there twice, under different names"):
        Checkpoint.open(folder)


def test_sizes_of_the_30b_are_those_that_are_published():
    raw = {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    config = parse(raw)
    every = sum(torch.Size(shape).numel() for shape in config.tensors().values())
    assert round(every / 1e9, 1) == 30.5
    idle = 48 * 120 * 3 * 768 * 2048
    assert round((every - idle) / 1e9, 1) == 3.4


@pytest.mark.long
def test_experts_in_one_launch_are_those_one_by_one_in_the_interpreter():
    """The checks have every activation, biases, scales, and a router that reads other rows."""
    check_interpreted("from tests.models.kernels.interpreted_experts import check_experts; check_experts()", 500)
