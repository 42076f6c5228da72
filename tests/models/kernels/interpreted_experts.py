"""Checks Triton's experts in its interpreter against experts one by one. It runs in a process of its own
(`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import torch
from attrs import evolve

from adapters.models.kernels.activations import CLAMPED, GELU, SILU
from adapters.models.kernels.cuda.device_traits import INTERPRETER, DeviceTraits
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.rows.expert_choice import choose_experts as choose_in_triton
from adapters.models.kernels.cuda.tiles import H200_SHARED
from adapters.models.kernels.cuda_capability import CudaCapability
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    ExpertsShape,
    GatedWeights,
    choose_experts,
)
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch

CPU = torch.device("cpu")
HIDDEN, INNER, COUNT, ROWS, BUCKET = 32, 32, 5, 13, 16
PLAIN = ExpertsShape(COUNT, 2, INNER, is_normalized=True)
SHAPES = {SILU: PLAIN, GELU: PLAIN, CLAMPED: BiasedExpertsShape(COUNT, 2, INNER, is_normalized=True)}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=make_generator(seed)) * shape[-1] ** -0.5


def make_expert(kernels: TritonKernels, activation: str, number: int) -> GatedWeights:
    both, down = random(2 * INNER, HIDDEN, seed=number), random(HIDDEN, INNER, seed=100 + number)
    is_built_in = activation in kernels.built_in_gates
    packed = kernels.pack_gated(both, activation) if is_built_in else kernels.pack(both)
    biases = (random(2 * INNER, seed=200 + number), random(HIDDEN, seed=300 + number)) if activation == CLAMPED else ()
    return GatedWeights(packed, kernels.pack(down), activation, *biases)


def check_experts() -> None:
    """Every activation, with biases and scales, and a router that reads other rows. Weights are read by descriptors and
    by pointers.
    """
    check_choice()
    ampere = DeviceTraits(CudaCapability(8, 0), 4, H200_SHARED)
    for traits in (INTERPRETER, ampere):
        check_activations(TritonKernels(CPU, pdl=False, traits=traits))


def check_choice() -> None:
    """Logits of bfloat16 are compared by keys of 32 bits. Some are equal, zero with either sign, or negative alone."""
    for count in (11, 128, 512):
        shape = ExpertsShape(count, 8, INNER, is_normalized=True, shared=1)
        logits = random(BUCKET, count + 1, seed=count).bfloat16()
        logits[3, :9], logits[4, ::2], logits[4, 1::2], logits[5] = 2.0, 0.0, -0.0, -1.5
        logits[6], logits[7] = logits[6].sign(), -logits[7].abs()
        expected, weights = choose_experts(logits[:, :count].float().contiguous(), shape)
        found = choose_in_triton(logits, Experts(shape, None, (), None), torch.arange(BUCKET), None)
        assert torch.equal(found.chosen.long(), expected), count
        torch.testing.assert_close(found.weights[:, :8], weights)


def check_activations(kernels: TritonKernels) -> None:
    batch = Batch(BUCKET, CPU)
    batch.load(Step((Segment(0, 0, ROWS),), BUCKET), None)
    x, deciding = random(BUCKET, HIDDEN, seed=1) * 4, random(BUCKET, HIDDEN, seed=2) * 4
    for activation, shape in SHAPES.items():
        each = [make_expert(kernels, activation, number) for number in range(COUNT)]
        plain = Experts(
            shape,
            kernels.pack(random(COUNT, HIDDEN, seed=3)),
            tuple(each),
            None,
            scales=torch.linspace(0.5, 2, COUNT) if activation == GELU else None,
            correction=torch.linspace(-1, 1, COUNT) if activation == CLAMPED else None,
        )
        grouped = evolve(plain, each=kernels.stack_experts(iter(each), COUNT))
        expected = kernels.experts(x, plain, batch, deciding)
        found = kernels.experts(x, grouped, batch, deciding)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert not found[ROWS:].any(), "padded rows go through no expert"
