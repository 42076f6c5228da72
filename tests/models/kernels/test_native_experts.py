"""All experts of a layer in one call of the library: the bits of one product after the other, for any rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight, StepLayout
from adapters.models.kernels.activations import CLAMPED
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.experts import NativeExperts
from adapters.models.kernels.cpu.native.experts import choose_experts as choose_in_one_call
from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.expert_sums import sum_experts
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import (
    Experts,
    ExpertsShape,
    GatedWeights,
    GroupedExpertsShape,
    choose_experts,
)
from adapters.models.numerics.synthetic import random_matrix
from tests.models.checkpoints import same_bits

COUNT, CHOSEN, HIDDEN, INNER = 7, 3, 256, 160
MOST_ROWS = 256  # of an expert in one run (ROWS of products.c)
HOST = torch.device("cpu")
LAYOUTS = {
    "plain": None,
    "Q4_K": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "Q8_0": StepLayout("int8", 32),
    "AWQ": StepLayout("uint4", 128, least="scale"),
    "FP8": StepLayout("e4m3", 128),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
}


def layer_of(kernels: CpuKernels, dtype: torch.dtype, layout: StepLayout | None, hidden: int, inner: int) -> Experts:
    generator = make_generator(3)

    def matrix(outputs: int, inputs: int, name: str) -> StackedWeight:
        if layout is not None:
            return StackedWeight((random_matrix((outputs, inputs), layout, name, HOST, inputs**-0.5),), dtype, HOST)
        drawn = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        return StackedWeight((drawn.to(dtype),), dtype, HOST)

    def expert(number: int) -> GatedWeights:
        gate, up, down = (
            matrix(inner, hidden, f"g{number}"),
            matrix(inner, hidden, f"u{number}"),
            matrix(hidden, inner, f"d{number}"),
        )
        both = StackedWeight((*gate.parts, *up.parts), dtype, HOST)
        return GatedWeights(kernels.pack_gated(both), kernels.pack(down))

    router = torch.randn(COUNT, hidden, generator=generator).to(dtype)
    each = kernels.stack_experts(map(expert, range(COUNT)), COUNT)
    return Experts(ExpertsShape(COUNT, CHOSEN, inner, is_normalized=True), kernels.pack(router), each, None)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_call_gives_the_bits_of_one_product_after_the_other(name: str, dtype: torch.dtype) -> None:
    kernels = CpuKernels(dtype)
    inner = 256 if LAYOUTS[name] else INNER - 1
    experts = layer_of(kernels, dtype, LAYOUTS[name], HIDDEN, inner)
    assert isinstance(experts.each, NativeExperts)
    x = torch.randn(40, HIDDEN, generator=make_generator(4)).to(dtype)
    expected, _ = sum_experts(kernels, x, experts, 40, int)
    assert expected.isfinite().all()
    for first, rows in ((0, 40), (5, 1), (38, 2), (7, 17)):
        found, _ = kernels.sum_experts(x[first : first + rows], experts, rows)
        assert same_bits(found, expected[first : first + rows])


def test_rows_of_an_expert_come_in_runs_that_the_library_takes() -> None:
    kernels = CpuKernels(torch.bfloat16)
    experts = layer_of(kernels, torch.bfloat16, None, 64, 32)
    rows = COUNT * MOST_ROWS  # an expert has three times the rows of a run on average
    x = torch.randn(rows, 64, generator=make_generator(6)).bfloat16()
    found, _ = kernels.sum_experts(x, experts, rows)
    expected, _ = sum_experts(kernels, x, experts, rows, int)
    assert same_bits(found, expected)


@pytest.mark.parametrize(
    "shape",
    [
        ExpertsShape(128, 8, 32, is_normalized=True),
        ExpertsShape(100, 6, 32, is_normalized=False),
        ExpertsShape(4, 4, 32, is_normalized=True),
        ExpertsShape(60, 1, 32, is_normalized=True),
        GroupedExpertsShape(64, 4, 32, is_normalized=True, groups=4, chosen_groups=2, factor=2.5),
    ],
    ids=str,
)
def test_one_call_chooses_the_experts_that_operations_choose(shape: ExpertsShape) -> None:
    compiled = find_library()
    assert compiled is not None
    products = NativeProducts(compiled, compiled.serving, torch.bfloat16)
    logits = torch.randn(300, shape.count + 1, generator=make_generator(7))
    logits[:100] = (logits[:100] * 2).round() / 2  # many are equal
    logits[100:200] = logits[100:200].bfloat16()
    logits[200] = 0.0
    logits[200, ::2] = -0.0
    logits[201] = -torch.inf
    logits[201, -4:] = 1.0
    logits = logits[:, : shape.count]  # a router may have one more column
    found = choose_in_one_call(products, logits, shape)
    expected = choose_experts(logits, shape)
    assert torch.equal(found[0], expected[0])
    assert same_bits(found[1], expected[1])


def test_many_rows_of_one_expert_have_the_bits_of_few() -> None:
    kernels = CpuKernels(torch.bfloat16)
    experts = layer_of(kernels, torch.bfloat16, None, 64, 32)
    x = torch.randn(1, 64, generator=make_generator(5)).bfloat16().repeat(2 * MOST_ROWS + 9, 1)
    found, _ = kernels.sum_experts(x, experts, len(x))
    alone, _ = kernels.sum_experts(x[:1], experts, 1)
    assert same_bits(found, alone.repeat(len(x), 1))


def test_experts_of_another_form_are_left_to_single_products() -> None:
    def stack(kernels: CpuKernels, *each: GatedWeights) -> object:
        return kernels.stack_experts(each, len(each))

    kernels = CpuKernels(torch.float32)

    def gated(inner: int, **how: Tensor | str) -> GatedWeights:
        weight = torch.randn(2 * inner, 32)
        packed = kernels.pack(weight) if "activation" in how else kernels.pack_gated(weight)
        return GatedWeights(packed, kernels.pack(torch.randn(32, inner)), **how)  # type: ignore[arg-type]

    assert isinstance(stack(kernels, gated(24), gated(24)), NativeExperts)
    assert isinstance(stack(kernels, gated(24), gated(40)), tuple), "sizes differ"
    assert isinstance(stack(kernels, gated(24, activation=CLAMPED)), tuple)
    assert isinstance(stack(kernels), tuple)
    without = CpuKernels(torch.float32, own=False)
    one = GatedWeights(without.pack_gated(torch.randn(48, 32)), without.pack(torch.randn(32, 24)))
    assert isinstance(stack(without, one), tuple)
