"""Counter-based Gumbel noise: what is drawn depends on seed, position and token id, and on nothing else.

The generator is SplitMix64 (Steele, Lea & Flood 2014), read at random instead of in sequence. With arithmetic modulo
2**64 and >>> for a shift that fills with zeros:

    key   = blake2b(seed as 8 bytes | position as 8 bytes, digest_size=8), all little-endian
    z     = key + (token + 1) * 0x9E3779B97F4A7C15
    z     = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9
    z     = (z ^ (z >>> 27)) * 0x94D049BB133111EB
    bits  = z ^ (z >>> 31)
    u     = ((bits >>> 12) + 1/2) / 2**52           exact in float64, never 0 nor 1
    noise = -log(-log(u))                           from about -3.6 to 36.7

The integers are the same on every device, and what is drawn with is found by logarithms that have one right answer
(`steady_gumbel_at`; on a GPU `gumbel` of `models/kernels/triton/logit_parts.py`). A library's are near enough for what a
draft guesses, and for who could be the one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from adapters.device.sampling.exact_exp import steady_log
from adapters.models.kernels.exact_functions import FIRST, GOLDEN, SECOND

FRACTION = 2**52


@lru_cache(maxsize=1024)
def key_of(seed: int, position: int) -> int:
    """The key of the token at `position`, as a signed 64-bit integer. What a draft asks for, its target asks again."""
    return int.from_bytes(blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest(), "little", signed=True)


def bits_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys int64 `[..., 1]`, token ids int64 `[V]` -> 64 random bits each, int64 `[..., V]`."""
    return _mixed(keys + (tokens + 1) * GOLDEN)


def _mixed(z: Tensor) -> Tensor:
    z = z.bitwise_xor_(_shift(z, 30)).mul_(FIRST)
    z = z.bitwise_xor_(_shift(z, 27)).mul_(SECOND)
    return z.bitwise_xor_(_shift(z, 31))


def _shift(z: Tensor, by: int) -> Tensor:
    """Torch shifts int64 arithmetically; the mask takes the copies of the sign away."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def gumbel(draws: Iterable[tuple[int, int]], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise for each (seed, position): float64 `[draws, vocab]`."""
    return gumbel_of(draws, torch.arange(vocab, device=device))


def gumbel_of(draws: Iterable[tuple[int, int]], tokens: Tensor) -> Tensor:
    """The noise of some tokens: int64 `[n]`, or `[draws, n]` where they differ -> float64 `[draws, n]`."""
    return gumbel_at(keys_of(draws).unsqueeze(1).to(tokens.device, non_blocking=True), tokens)


def keys_of(draws: Iterable[tuple[int, int]]) -> Tensor:
    """On the host: int64 `[draws]`."""
    return torch.tensor([key_of(seed, position) for seed, position in draws], dtype=torch.int64)


def gumbel_at(keys: Tensor, tokens: Tensor) -> Tensor:
    """Of a key and a token each, int64 both, of shapes that go together -> float64."""
    uniform = _shift(bits_of(keys, tokens), 12).double().add_(0.5).mul_(1 / FRACTION)
    return uniform.log_().neg_().log_().neg_()


def steady_gumbel_at(keys: Tensor, tokens: Tensor) -> Tensor:
    """The same by `exponent.steady_log`: to the bit what every processor finds."""
    uniform = _shift(bits_of(keys, tokens), 12).double().add_(0.5).mul_(1 / FRACTION)
    return steady_log(steady_log(uniform).neg_()).neg_()


def fractions(key: Tensor, vocab: int) -> Tensor:
    """What the noise of each token rises with: int64 `[vocab]` in 0..FRACTION - 1."""
    return _shift(_mixed(key + _steps(vocab)), 12)


@lru_cache(maxsize=2)
def _steps(vocab: int) -> Tensor:
    """What each token adds to a key."""
    return torch.arange(1, vocab + 1) * GOLDEN
