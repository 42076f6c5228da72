"""Packed experts on CUDA: a pair's product has the bits of what the weight stands for, however many pairs there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.packed_matrix import MXFP4, PackedMatrix, StackedWeight, StepLayout
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.families.qwen3_moe import FAMILY, Qwen3MoeConfig
from adapters.models.kernels.activations import CLAMPED, SILU
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    ExpertsShape,
    GatedWeights,
    StackedExperts,
)
from adapters.models.kernels.interfaces.row_kernels import add_delta
from adapters.models.kernels.offload import count_bytes
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.numerics.probe import ProbeShape, probe
from adapters.models.numerics.synthetic import random_matrix
from tests.models.checkpoints import same_bits
from tests.models.kernels.cuda_numbers import unpack_for_cuda

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)
triton_groups = pytest.importorskip("adapters.models.kernels.cuda.packed_groups")

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
Q4_K = StepLayout("uint4", 32, per=8, inner=True, least="own")
LAYOUTS = {
    "Q4_K": Q4_K,
    "Q5_K": StepLayout("int8", 32, per=8, inner=True, least="own"),
    "Q6_K": StepLayout("int8", 16, per=16, inner=True),
    "Q8_0": StepLayout("int8", 32),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
    "AWQ": StepLayout("uint4", 128, least="scale"),
    "int4": StepLayout("uint4", 128, scale="bfloat16", least="scale"),
    "int8": StepLayout("int8", 128, scale="bfloat16"),
    "FP8": StepLayout("e4m3", 128, scale="float32"),
    "MXFP4": MXFP4,
}
SIZES = (
    *((name, 2048, 768) for name in LAYOUTS),
    ("MXFP4", 2880, 320),
    ("Q8_0", 832, 192),
    ("Q4_K", 1280, 256),
    ("Q4_K", 1024, 512),
)
COUNT, CHOSEN = 16, 4
ROWS = (1, 4, 16, 64, 100, 256, 700)  # tiles of 8, 16, 32, 64 and 128 pairs
# A bucket, the first row in it, and how many rows.
PARTS = ((1, 9, 1), (4, 9, 1), (8, 100, 5), (16, 50, 13), (64, 0, 33), (128, 3, 128), (512, 200, 300))


class PackedLayer:
    """A layer of packed experts on the device, and the same numbers unpacked."""

    def __init__(self, layout: StepLayout, hidden: int, inner: int, activation: str = SILU) -> None:
        self.kernels = triton_cuda.TritonKernels(DEVICE)
        self.kernels.graphs.enabled = False
        self.activation = activation
        shape = BiasedExpertsShape if activation == CLAMPED else ExpertsShape
        self.shape = shape(COUNT, CHOSEN, inner, is_normalized=True)
        self.generator = make_generator(3, DEVICE)
        self.x = torch.randn(max(ROWS), hidden, generator=self.generator, device=DEVICE).to(BF16)
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.matrices = [
            {
                part: random_matrix(size, layout, f"{part} {number}", DEVICE, size[1] ** -0.5)
                for part, size in sizes.items()
            }
            for number in range(COUNT)
        ]
        self.each = [self._pack(each) for each in self.matrices]
        router = torch.randn(COUNT, hidden, generator=self.generator, device=DEVICE) * hidden**-0.5
        self.experts = Experts(
            self.shape,
            self.kernels.pack(router.to(BF16)),
            self.kernels.stack_experts(iter(self.each), COUNT),
            None,
            correction=torch.zeros(COUNT, device=DEVICE) if activation == CLAMPED else None,
        )

    def _pack(self, each: dict[str, PackedMatrix]) -> GatedWeights:
        pack = self.kernels.pack_gated if self.activation == SILU else self.kernels.pack
        both = pack(StackedWeight((each["gate"], each["up"]), BF16, DEVICE))
        down = self.kernels.pack(StackedWeight((each["down"],), BF16, DEVICE))
        if self.activation == SILU:
            return GatedWeights(both, down, SILU)
        sizes = (2 * self.shape.inner, self.x.shape[1])
        biases = (torch.randn(size, generator=self.generator, device=DEVICE).to(BF16) for size in sizes)
        return GatedWeights(both, down, CLAMPED, *biases)

    @property
    def stacked(self) -> GatedWeights:
        assert isinstance(self.experts.each, StackedExperts)
        return self.experts.each.weights

    def fed(self, x: Tensor, bucket: int, experts: Experts | None = None) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, bucket - len(x)), value=0.5)
        batch = Batch(bucket, DEVICE)
        batch.load(Step((Segment(0, 0, len(x)),), bucket), None)
        return self.kernels.experts(padded, experts or self.experts, batch)[: len(x)].clone()


def multiply_unpacked(layer: PackedLayer, number: int, part: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The products of an expert's unpacked weights with all rows: gated ones, and those behind them."""
    each = layer.matrices[number]
    pair = layer.kernels.pack_gated(torch.cat([unpack_for_cuda(each[one], BF16) for one in ("gate", "up")])).weight
    gated = x.new_empty(len(x), layer.shape.inner)
    layer.kernels.products.multiply(x, pair, gated, gated=True, piece=part.piece)
    down = layer.stacked.down.parts[0]
    out = x.new_empty(len(x), x.shape[1])
    layer.kernels.products.multiply(gated, unpack_for_cuda(each["down"], BF16), out, gated=False, piece=down.piece)
    return gated, out


@pytest.mark.parametrize(("name", "hidden", "inner"), SIZES, ids=str)
def test_a_pair_has_the_bits_of_the_unpacked_product_at_every_row_count(name, hidden, inner):
    layout = LAYOUTS[name]
    layer = PackedLayer(layout, hidden, inner)
    gate, down = layer.stacked.gate_up, layer.stacked.down
    assert count_bytes(layer.stacked) < 1.2 * COUNT * 3 * hidden * inner * layout.bits / 8 + (1 << 16)
    expected = [multiply_unpacked(layer, number, gate.parts[0], layer.x) for number in range(COUNT)]
    grouped = layer.kernels.grouped_experts
    for rows in ROWS:
        x = layer.x[:rows].contiguous()
        order = torch.rand(rows, COUNT, generator=layer.generator, device=DEVICE).argsort(1)
        chosen = order[:, :CHOSEN].int().contiguous()
        tile = grouped.choose_tile(gate, chosen.numel(), COUNT)
        alone = rows == 1 and tile.is_few  # one row needs no tiles
        dealt = (
            triton_groups.PairTiles.of_row(chosen, COUNT)
            if alone
            else grouped.deal_pairs(chosen, None, tile.pairs, COUNT)
        )
        inner_rows = torch.full((chosen.numel(), inner), torch.nan, device=DEVICE, dtype=BF16)
        grouped.multiply_pairs(x, gate, inner_rows, dealt, tile, share=CHOSEN)
        out = torch.full((chosen.numel(), hidden), torch.nan, device=DEVICE, dtype=BF16)
        tile = grouped.choose_tile(down, chosen.numel(), COUNT)
        grouped.multiply_pairs(inner_rows, down, out, evolve(dealt, is_early=True), tile)
        for pair, number in enumerate(chosen.flatten().tolist()):
            gated, whole = expected[number]
            row = pair // CHOSEN
            assert same_bits(inner_rows[pair], gated[row]), (rows, pair, "gate")
            assert same_bits(out[pair], whole[row]), (rows, pair, "down")


@pytest.mark.parametrize("activation", [SILU, CLAMPED])
@pytest.mark.parametrize("layout", [Q4_K, MXFP4], ids=["Q4_K", "MXFP4"])
def test_a_row_has_the_same_bits_in_any_company_and_those_of_experts_one_by_one(layout, activation):
    layer = PackedLayer(layout, 512, 256, activation)
    whole = layer.fed(layer.x, 1024)
    for bucket, at, count in PARTS:
        assert same_bits(layer.fed(layer.x[at : at + count], bucket), whole[at : at + count]), (bucket, at, count)
    plain = evolve(layer.experts, each=tuple(layer.each))
    expected = layer.fed(layer.x, len(layer.x), plain)
    torch.testing.assert_close(whole, expected, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(("hidden", "inner"), [(512, 256), (2880, 320)])
def test_a_row_whose_experts_the_next_norm_adds_up_has_the_same_bits(hidden, inner):
    """Logits are equal, zero with either sign, or different. A padded row adds nothing."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper's")
    layer = PackedLayer(MXFP4, hidden, inner, CLAMPED)
    kernels = layer.kernels
    drawn = torch.randn(COUNT, generator=layer.generator, device=DEVICE)
    nothing = kernels.pack(torch.zeros(COUNT, hidden, device=DEVICE, dtype=BF16))
    signs = torch.tensor([0.0, -0.0] * (COUNT // 2), device=DEVICE)
    for router, correction in ((layer.experts.router, drawn), (nothing, drawn), (nothing, signs)):
        experts = evolve(layer.experts, router=router, correction=correction)
        for at in (0, 5, -1):
            batch = Batch(1, DEVICE)
            batch.load(Step((Segment(0, 0, 1),) if at >= 0 else (), 1), None)
            x = layer.x[at][None]
            late = kernels.experts_late(x, experts, batch)
            assert not isinstance(late, Tensor)
            whole = kernels.experts(x, experts, batch)
            for weight in (layer.x[6], layer.x[7].float()):
                residuals = [layer.x[8:9].clone() for _ in range(2)]
                found, expected = (
                    kernels.add_norm(residual, delta, weight, 1e-5)
                    for residual, delta in zip(residuals, (late, whole), strict=True)
                )
                assert same_bits(found, expected)
                assert same_bits(*residuals)
            residuals = [layer.x[8:9].clone() for _ in range(2)]
            add_delta(residuals[0], late)
            add_delta(residuals[1], whole)
            assert same_bits(*residuals)


def test_experts_that_are_packed_in_several_ways_are_multiplied_one_by_one():
    layer = PackedLayer(Q4_K, 512, 256)
    other = PackedLayer(LAYOUTS["Q8_0"], 512, 256)
    each = layer.kernels.stack_experts(iter([*layer.each[:-1], other.each[-1]]), COUNT)
    assert isinstance(each, tuple)
    assert len(each) == COUNT
    mixed = evolve(layer.experts, each=each)
    expected = evolve(layer.experts, each=(*layer.each[:-1], other.each[-1]))
    assert same_bits(layer.fed(layer.x, 1024, mixed), layer.fed(layer.x, 1024, expected))


@pytest.mark.parametrize("room", [1, 5, 40])
def test_packed_experts_can_be_brought_from_host_memory(room):
    layer = PackedLayer(Q4_K, 512, 256)
    size = count_bytes(layer.each[0])
    hosted = HostExperts(DEVICE, COUNT, room * (size + 4096))
    away = evolve(layer.experts, each=hosted.add_layer(iter(layer.each)))
    hosted.move_experts((place, COUNT - 1 - place) for place in range(min(hosted.expert_slots, COUNT)))
    for bucket, count in ((4, 1), (16, 16), (1024, len(layer.x))):
        assert same_bits(layer.fed(layer.x[:count], bucket, away), layer.fed(layer.x[:count], bucket))


def test_the_probe_finds_that_packed_experts_keep_their_bits_and_tells_them_from_others():
    shape = ExpertsShape(8, 2, 256, is_normalized=True)
    config = Qwen3MoeConfig(4096, 512, 1280, 2, 8, 2, 64, 2048, 1e6, experts=shape)
    how: dict[str, Any] = {"device": DEVICE, "dtype": BF16, "chunk": 512, "capacity": 1024}
    kernels = triton_cuda.TritonKernels(DEVICE)
    layouts = {name: Q4_K for name in config.tensors() if ".experts." in name}
    packed = probe(FAMILY, config, kernels, ProbeShape(**how, layouts=layouts))
    assert packed.mode == "buckets"
    assert packed.failures == ()
    assert packed.numerics_class != probe(FAMILY, config, kernels, ProbeShape(**how)).numerics_class
