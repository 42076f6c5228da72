"""Triton's norms and gates in its interpreter, beside operations one by one. Runs by itself (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import torch
from attrs import evolve

from adapters.models.kernels.activations import CLAMPED, GELU, SILU, gate_halves
from adapters.models.kernels.composed_operations import add_normed
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.row_kernels import NormedRows

CPU = torch.device("cpu")
ROWS, WIDTH = 3, 40


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=make_generator(seed)) * 3


def check_norms() -> None:
    """Sums of two, factors, up to three norms of the sum; norms in two dtypes are computed one by one."""
    kernels = TritonKernels(CPU, pdl=False)
    weight, parallel_weight, own, *outer = (random(WIDTH, seed=seed) for seed in range(1, 7))
    rows, parallel, residual = (random(ROWS, WIDTH, seed=seed).half() for seed in (7, 8, 9))
    other = (parallel, parallel_weight, own)
    for delta, norms in (
        (NormedRows(rows, weight), outer),
        (NormedRows(rows, weight, factor=0.37), outer[:1]),
        (NormedRows(rows, weight, other, 0.37), []),
        (NormedRows(rows, weight, other), [outer[0], outer[1].half()]),
    ):
        expected, found = residual.clone(), residual.clone()
        given = evolve(delta, rows=rows.clone())
        sums = add_normed(kernels.add_norm, expected, given, 1e-6, norms)
        own_sums = kernels.add_normed(found, delta, 1e-6, norms)
        assert torch.equal(found, expected)
        assert len(own_sums) == len(norms)
        assert all(map(torch.equal, own_sums, sums))


def check_biases() -> None:
    kernels = TritonKernels(CPU, pdl=False)
    residual, delta = (random(ROWS, WIDTH, seed=seed).half() for seed in (1, 2))
    bias, weight = random(WIDTH, seed=3).half(), random(WIDTH, seed=4)
    expected, found = residual.clone(), residual.clone()
    one = kernels.add_norm(expected, delta + bias, weight, 1e-6)
    assert torch.equal(kernels.add_norm(found, delta, weight, 1e-6, bias=bias), one)
    assert torch.equal(found, expected)


def check_gates() -> None:
    """What every activation lets through, as torch says: its 1 + tanh has no digits left where that is close to 0."""
    kernels = TritonKernels(CPU, pdl=False)
    for activation in (SILU, GELU, CLAMPED):
        both, biases = random(ROWS, 2 * WIDTH, seed=1) * 4, random(5, 2 * WIDTH, seed=2)
        if activation == SILU:
            gate, up = both.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        else:
            expected = gate_halves(activation, both.clone(), None)
        torch.testing.assert_close(kernels.apply_gate(activation, both, None), expected, rtol=2e-6, atol=1e-5)
        biased = kernels.apply_gate(activation, both + biases[3], None)
        assert torch.equal(kernels.apply_gate(activation, both, biases[3]), biased)


if __name__ == "__main__":
    check_norms()
    check_biases()
    check_gates()
