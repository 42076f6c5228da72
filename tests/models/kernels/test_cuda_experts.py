"""Tests of a layer of experts on CUDA: it agrees with the plain form, and a row's bits depend neither on other rows nor
on where the experts are.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.kernels.activations import CLAMPED, GELU, SILU
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    ExpertsShape,
    GatedWeights,
    GroupedExpertsShape,
    SigmoidExpertsShape,
    choose_experts,
)
from adapters.models.kernels.interfaces.row_kernels import add_delta
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from tests.models.checkpoints import same_bits

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)
choose_on_cuda = pytest.importorskip("adapters.models.kernels.cuda.rows.expert_choice").choose_experts

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
ROWS = 700
# A bucket, the first row in it, and how many rows.
PARTS = ((1, 9, 1), (4, 9, 1), (8, 100, 5), (16, 50, 13), (64, 0, 33), (128, 3, 128), (512, 200, 300))


class ScaledShape(ExpertsShape):
    """The shape of Gemma 4's experts: gated by GELU, with a factor for each expert, and a router that reads
    other rows.
    """


SHAPES = {
    "a shared one": (ExpertsShape(24, 4, 256, is_normalized=True, shared=128), 512),
    "odd sizes": (ExpertsShape(11, 3, 72, is_normalized=False), 104),
    "by sigmoids": (SigmoidExpertsShape(24, 4, 256, is_normalized=True, shared=128, factor=1.5), 512),
    "by sigmoids, in groups": (
        SigmoidExpertsShape(12, 3, 72, is_normalized=False, groups=3, chosen_groups=2),
        104,
    ),
    "all for every row": (ExpertsShape(5, 5, 64, is_normalized=True), 128),
    "clamped, with biases": (BiasedExpertsShape(24, 4, 96, is_normalized=True), 128),
    "GELU, with scales": (ScaledShape(11, 3, 72, is_normalized=True), 104),
    "GELU, with scales, ahead": (ScaledShape(11, 3, 80, is_normalized=True), 112),
    "of many": (ExpertsShape(64, 8, 96, is_normalized=True), 144),
    "all ahead": (ExpertsShape(24, 4, 96, is_normalized=True), 144),
}


class Layer:
    """A feed-forward of experts, all of them on the device, and rows for it."""

    def __init__(self, shape: ExpertsShape, hidden: int, dtype: torch.dtype) -> None:
        self.kernels, self.shape = triton_cuda.TritonKernels(DEVICE), shape
        self.generator = make_generator(3, DEVICE)
        self.x = torch.randn(ROWS, hidden, generator=self.generator, device=DEVICE).to(dtype)
        self.each = tuple(self._gated(shape.inner) for _ in range(shape.count))
        router = self.kernels.pack(self._weight(shape.router_outputs, hidden))
        shared = self._gated(shape.shared) if shape.shared else None
        correction = torch.randn(shape.count, generator=self.generator, device=DEVICE)
        self.experts = Experts(
            shape,
            router,
            self.kernels.stack_experts(iter(self.each), shape.count),
            shared,
            scales=torch.rand(shape.count, device=DEVICE) + 0.5 if isinstance(shape, ScaledShape) else None,
            correction=correction if isinstance(shape, SigmoidExpertsShape | BiasedExpertsShape) else None,
        )

    def _weight(self, outputs: int, inputs: int) -> Tensor:
        drawn = torch.randn(outputs, inputs, generator=self.generator, device=DEVICE)
        return (drawn * inputs**-0.5).to(self.x.dtype)

    def _gated(self, inner: int) -> GatedWeights:
        hidden = self.x.shape[1]
        both, down = self._weight(2 * inner, hidden), self.kernels.pack(self._weight(hidden, inner))
        match self.shape:
            case BiasedExpertsShape():
                biases = (self._weight(1, size)[0] for size in (2 * inner, hidden))
                return GatedWeights(self.kernels.pack(both), down, CLAMPED, *biases)
            case ScaledShape():
                return GatedWeights(self.kernels.pack_gated(both, GELU), down, GELU)
        return GatedWeights(self.kernels.pack_gated(both), down, SILU)

    def fed(self, x: Tensor, bucket: int, experts: Experts | None = None) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, bucket - len(x)), value=0.5)
        deciding = padded.flip(1) if isinstance(self.shape, ScaledShape) else None
        made = self.kernels.experts(padded, experts or self.experts, batch_of(bucket, len(x)), deciding)
        assert not made[len(x) :].any(), "padded rows go through no expert"
        return made[: len(x)].clone()


def batch_of(bucket: int, rows: int) -> Batch:
    batch = Batch(bucket, DEVICE)
    batch.load(Step((Segment(0, 0, rows),), bucket), None)
    return batch


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.mark.parametrize(("shape", "hidden"), SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape, hidden, dtype):
    layer = Layer(shape, hidden, dtype)
    whole = layer.fed(layer.x, 1024)
    for bucket, at, count in PARTS:
        assert same_bits(layer.fed(layer.x[at : at + count], bucket), whole[at : at + count]), (bucket, at, count)
    one = layer.x[9:10]
    for others in (one.expand(60, -1), torch.full_like(layer.x[:60], torch.nan), torch.zeros_like(layer.x[:60])):
        assert same_bits(layer.fed(torch.cat((others[:31], one, others[31:])), 64)[31], whole[9])


@pytest.mark.parametrize(("shape", "hidden"), SHAPES.values(), ids=SHAPES)
def test_the_next_norm_adds_up_the_bits_of_a_sum_of_its_own(shape, hidden, dtype):
    """A padded row adds nothing."""
    layer = Layer(shape, hidden, dtype)
    kernels = layer.kernels
    for bucket, at, count in PARTS:
        x = torch.nn.functional.pad(layer.x[at : at + count], (0, 0, 0, bucket - count), value=0.5)
        for batch in (batch_of(bucket, count), batch_of(bucket, 0)):
            late = kernels.experts_late(x, layer.experts, batch)
            assert not isinstance(late, Tensor)
            whole = kernels.experts(x, layer.experts, batch)
            for weight in (layer.x[6], layer.x[7].float()):
                residuals = [x.clone() for _ in range(2)]
                pairs = zip(residuals, (late, whole), strict=True)
                found, expected = (kernels.add_norm(residual, delta, weight, 1e-5) for residual, delta in pairs)
                assert same_bits(found, expected), (bucket, at, count)
                assert same_bits(*residuals)
            residuals = [x.clone() for _ in range(2)]
            add_delta(residuals[0], late)
            add_delta(residuals[1], whole)
            assert same_bits(*residuals)


@pytest.mark.parametrize(("shape", "hidden"), SHAPES.values(), ids=SHAPES)
def test_it_is_what_experts_make_one_by_one(shape, hidden, dtype):
    layer = Layer(shape, hidden, dtype)
    plain = evolve(layer.experts, each=layer.each)
    expected = layer.fed(layer.x, ROWS, plain).float()
    found = layer.fed(layer.x, 1024).float()
    assert (found - expected).abs().max() <= max(2 * torch.finfo(dtype).eps, 2e-6) * expected.abs().max()


@pytest.mark.parametrize("count", [11, 128, 512])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_choose_as_they_do_on_a_cpu(count, logits_dtype):
    shape = ExpertsShape(count, 8, 8, is_normalized=True, shared=1)
    logits = torch.randn(64, count + 1, generator=make_generator(1)).bfloat16().float()
    logits[3, :9], logits[4, ::2], logits[4, 1::2], logits[5] = 2.0, 0.0, -0.0, torch.nan
    chosen, weights = choose_experts(logits[:, :count].contiguous(), shape)
    kernels, batch = triton_cuda.TritonKernels(DEVICE), batch_of(64, 60)
    experts = Experts(shape, None, (), None)
    choice = choose_on_cuda(logits.to(DEVICE, logits_dtype), experts, batch.positions, kernels.pdl)
    found, shares = choice.chosen, choice.weights
    assert torch.equal(found[:60].cpu().long(), chosen[:60])
    assert (found[60:] == count).all(), "padded rows choose no expert"
    torch.testing.assert_close(shares[:60, :8].cpu(), weights[:60], equal_nan=True)
    torch.testing.assert_close(shares[:60, 8].cpu(), logits[:60, count].sigmoid(), equal_nan=True)


@pytest.mark.parametrize("kind", [SigmoidExpertsShape, GroupedExpertsShape])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 8)])
def test_rows_choose_in_groups_as_they_do_on_a_cpu(kind, groups):
    count, open_groups = groups
    shape = kind(32, 8, 8, is_normalized=True, shared=1, groups=count, chosen_groups=open_groups)
    logits = torch.randn(64, 32, generator=make_generator(1)).bfloat16().float()
    logits[3, :9], logits[4, ::2], logits[4, 1::2] = 2.0, 0.0, -0.0
    # A step that is wider than any rounding of a sigmoid: both devices order scores alike.
    correction = (torch.randn(32, generator=make_generator(2)) * 8).round() / 8
    if kind is GroupedExpertsShape:
        correction = torch.zeros(32)
    chosen, weights = choose_experts(logits, shape, correction)
    kernels, batch = triton_cuda.TritonKernels(DEVICE), batch_of(64, 60)
    experts = Experts(shape, None, (), None, correction=correction.to(DEVICE))
    choice = choose_on_cuda(logits.to(DEVICE), experts, batch.positions, kernels.pdl)
    found, shares = choice.chosen, choice.weights
    same = (found[:60].cpu().long() == chosen[:60]).all(1)
    assert same.float().mean() >= 0.95, "scores that round to one number may change places"
    torch.testing.assert_close(shares[:60, :8].cpu()[same], weights[:60][same])
    assert (shares[:, 8] == 1).all(), "the shared expert has no gate"


@pytest.mark.parametrize("room", [1, 5, 12, 40])
def test_wherever_experts_lie_the_rows_are_the_same(room):
    """From one on its way at a time and no places to places for all of them."""
    shape, hidden = SHAPES["a shared one"]
    layer = Layer(shape, hidden, torch.bfloat16)
    hosted = HostExperts(DEVICE, shape.count, room * 3 * shape.inner * hidden * 2)
    away = evolve(layer.experts, each=hosted.add_layer(iter(layer.each)))
    for slots in (0, hosted.expert_slots):
        hosted.move_experts((slot, shape.count - 1 - slot) for slot in range(slots))
        for bucket, count in ((4, 1), (16, 16), (1024, ROWS)):
            expected = layer.fed(layer.x[:count], bucket)
            assert same_bits(layer.fed(layer.x[:count], bucket, away), expected)
    assert hosted.build_figures()["brought"] > 0
