"""Tests that products in the arithmetic of AMX (`amx.h`) are the sums that they are documented to be, for any rows.

Any processor with AVX-512 computes them, so that these tests run without AMX. Where there is AMX, many rows go through
tiles.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from attrs import evolve

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native import native_library
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.functions.seeded import make_generator

BRAIN = torch.bfloat16
BLOCK = 32  # terms
ROWS = (*range(1, 19), 31, 32, 33, 47, 64, 257, 300)
TINY = 2.0**-126  # the smallest normal number


@pytest.fixture(scope="module")
def own(native_code):
    if native_code.level < 2:
        pytest.skip("no AVX-512")
    return NativeProducts(native_code, native_library.TILES)


def random(*shape, seed=1, middle=0):
    """Return random numbers of many magnitudes around 2**middle."""
    generator = make_generator(seed)
    found = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp2()
    return (found * 2.0**middle).to(BRAIN)


def nearest(exact: Fraction) -> np.float32:
    """Return the float32 next to a number, the even one of two; zero where that is too small to be normal."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-math.inf)), guess, np.nextafter(guess, np.float32(math.inf))]
    found = min(near, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.uint32)) & 1))
    return np.float32(0) if abs(float(found)) < TINY else found


def normal(number: float) -> Fraction:
    return Fraction(0) if abs(number) < TINY else Fraction(number)


def add(one: np.float32, other: np.float32) -> np.float32:
    return nearest(Fraction(float(one)) + Fraction(float(other)))


def sum_blocks(row: list[float], weights: list[float]) -> np.float32:
    """Compute an output exactly as amx.h describes it. Zeros have no sign here."""
    found = np.float32(0)
    for start in range(0, len(row), BLOCK):
        chains = [np.float32(0), np.float32(0)]
        for k in range(start, min(start + BLOCK, len(row))):
            chains[k % 2] = nearest(normal(row[k]) * normal(weights[k]) + Fraction(float(chains[k % 2])))
        found = add(found, add(*chains))
    return found


def same(found, expected):
    """Return whether both have the same bits; a zero has no sign, and NaN is NaN."""
    one, other = ((each + 0.0).nan_to_num(nan=7.5).view(torch.int32) for each in (found, expected))
    return torch.equal(one, other)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("middle", [0, -63])
@pytest.mark.parametrize(("rows", "outputs", "terms"), [(1, 1, 1), (4, 3, 31), (2, 33, 33), (5, 3, 64), (17, 2, 101)])
def test_an_output_is_a_sum_over_blocks_of_two_chains(own, rows, outputs, terms, middle):
    """With a middle of -63 many products and sums are too small to be normal."""
    x, weight = random(rows, terms, middle=middle), random(outputs, terms, seed=2, middle=middle)
    exact = [[float(sum_blocks(row, one)) for one in weight.tolist()] for row in x.tolist()]
    assert same(own.multiply(x, own.pack(weight)), torch.tensor(exact))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("outputs", "terms"), [(32, 64), (33, 1000), (130, 400), (7, 17), (96, 1600)])
def test_bits_are_the_same_for_any_number_of_rows_on_any_threads(own, two_threads, outputs, terms):
    x, weight = random(300, terms), own.pack(random(outputs, terms, seed=2))
    gate, up = (own.pack(random(outputs, terms, seed=seed)) for seed in (3, 4))
    expected = torch.cat([own.multiply(row, weight) for row in x.split(1)])
    gated = torch.cat([own.multiply(row, gate, up) for row in x.split(1)])
    torch.testing.assert_close(expected.double(), x.double() @ as_matrix(weight).double().t(), rtol=1e-4, atol=1e-3)
    before = torch.get_num_threads()
    try:
        for count in ROWS:
            torch.set_num_threads(1 + count % 3)
            at = (300 - count) // 2
            assert same(own.multiply(x[at : at + count], weight), expected[at : at + count]), count
            assert same(own.multiply(x[at : at + count], gate, up), gated[at : at + count]), count
    finally:
        torch.set_num_threads(before)


def as_matrix(packed):
    """Return a packed weight as it was, `[outputs, terms]`."""
    panels = packed.panels.view(-1, packed.panels.shape[1] // 2, 32, 2).transpose(1, 2)
    return panels.flatten(2).flatten(0, 1)[: packed.outputs, : packed.terms]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [2, 7, 16, 30])
def test_what_is_no_number_stays_in_its_row(own, bad, rows):
    x, weight = random(rows, 90), own.pack(random(70, 90, seed=2))
    clean = own.multiply(x, weight)
    x[1, 3] = bad
    found = own.multiply(x, weight)
    others = [row for row in range(rows) if row != 1]
    assert same(found[others], clean[others])
    assert not found[1].isfinite().any()


@pytest.mark.timeout(60)
def test_rows_in_float32_have_the_arithmetic_of_all_levels(own):
    x, weight = random(9, 70).float(), random(40, 70, seed=2)
    assert same(own.multiply(x, own.pack(weight)), evolve(own, level=0).multiply(x, own.pack(weight)))


@pytest.mark.timeout(60)
def test_tiles_serve_wherever_they_are(native_code):
    """Their bits are others, so that a choice by time would find or miss what was kept by chance."""
    assert native_library.choose_level(native_code.code, native_library.TILES) == native_library.TILES


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("level", "dtype", "begins"), [(4, BRAIN, True), (4, torch.float32, False), (3, BRAIN, False)])
def test_the_name_of_the_kernels_tells_the_arithmetic(native_code, monkeypatch, level, dtype, begins):
    serving = evolve(native_code, level=level, serving=level)
    monkeypatch.setattr(native_library, "load_library", lambda: (serving, ""))
    monkeypatch.delenv(native_library.SWITCH, raising=False)
    name = CpuKernels(dtype).name
    assert name.startswith("native-amx-") is begins
    assert name.startswith("native-")
