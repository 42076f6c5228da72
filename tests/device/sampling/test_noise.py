"""The counter-based noise: the published generator, uniform, and the same whatever it is drawn with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.functions.noise import gumbel, noise_key, random_bits

MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """Steele, Lea & Flood 2014, on Python integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def unsigned(bits: Tensor) -> list[int]:
    return [value & MASK for value in bits.flatten().tolist()]


def test_the_bits_are_those_of_splitmix64_started_at_the_key():
    seed, position = 2**63 - 1, 123_456
    key = noise_key(seed, position)
    expected = [splitmix((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK) for token in range(1000)]
    assert unsigned(random_bits(torch.tensor([key]), torch.arange(1000))) == expected


def test_the_noise_never_changes_between_versions():
    """A recorded trace is executed again by later versions, so these figures are for ever."""
    assert noise_key(0, 0) == 1041621211125469266
    assert gumbel([(7, 3)], 3)[0].tolist() == pytest.approx(
        [1.7471994294131432, -1.526268118263954, 0.6228608506508356]
    )


def test_noise_is_the_inverse_of_the_gumbel_distribution_at_the_documented_uniform():
    bits = unsigned(random_bits(torch.tensor([noise_key(1, 2)]), torch.arange(500)))
    expected = [-math.log(-math.log(((word >> 12) + 0.5) / 2**52)) for word in bits]
    assert gumbel([(1, 2)], 500)[0].tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_a_draw_does_not_depend_on_the_draws_beside_it():
    draws = [(seed, position) for seed in (0, 5) for position in (0, 1, 99)]
    for vocab in (1, 31, 97, 4099):
        together = gumbel(draws, vocab)
        assert all(torch.equal(row, gumbel([draw], vocab)[0]) for row, draw in zip(together, draws, strict=True))


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary():
    assert torch.equal(
        random_bits(torch.tensor([[noise_key(3, 4)]]), torch.arange(5000))[:, :17],
        random_bits(torch.tensor([[noise_key(3, 4)]]), torch.arange(17)),
    )


def test_every_bit_is_set_half_of_the_time_and_neighbours_are_unrelated():
    keys = torch.tensor([[noise_key(11, position)] for position in range(100)])
    bits = random_bits(keys, torch.arange(200))
    expected = bits.numel() / 2
    spread = math.sqrt(bits.numel()) / 2
    for shift in range(64):
        column = (bits >> shift) & 1
        assert abs(column.sum().item() - expected) < 4.5 * spread
        assert abs((column[1:] ^ column[:-1]).sum().item() - expected * 99 / 100) < 4.5 * spread
        assert abs((column[:, 1:] ^ column[:, :-1]).sum().item() - expected * 199 / 200) < 4.5 * spread


def test_noise_has_the_moments_of_a_standard_gumbel_distribution():
    noise = gumbel([(2, position) for position in range(100)], 4096)
    error = math.pi / math.sqrt(6 * noise.numel())
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=4 * error)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert noise.isfinite().all()


@pytest.mark.cuda
def test_cuda_draws_the_same_bits_as_the_host():
    keys = torch.tensor([[noise_key(seed, 5)] for seed in range(50)])
    here = random_bits(keys, torch.arange(4099))
    assert torch.equal(random_bits(keys.cuda(), torch.arange(4099, device="cuda")).cpu(), here)
    draws = [(seed, 5) for seed in range(50)]
    torch.testing.assert_close(gumbel(draws, 4099, "cuda").cpu(), gumbel(draws, 4099), rtol=1e-13, atol=1e-13)
