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
(`exact_gumbel_at`; on a GPU `gumbel` of `triton/logit_parts.py`). The logarithms of a library are near enough for a
draft's guesses, and to find the tokens that could be drawn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from adapters.models.kernels.functions.exact_exp import exact_log
from adapters.models.kernels.functions.exact_functions import FIRST, GOLDEN, SECOND

FRACTION = 2**52


@lru_cache(maxsize=1024)
def noise_key(seed: int, position: int) -> int:
    """Return the key of the token at `position` as a signed 64-bit integer. The cache serves a target that asks for
    the keys that its draft has used.
    """
    return int.from_bytes(blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest(), "little", signed=True)


def random_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return 64 random bits for each key and token: keys int64 `[..., 1]` and token ids int64 `[V]` give int64 `[...,
    V]`.
    """
    return _mix(keys + (tokens + 1) * GOLDEN)


def _mix(z: Tensor) -> Tensor:
    z = z.bitwise_xor_(_shift_right(z, 30)).mul_(FIRST)
    z = z.bitwise_xor_(_shift_right(z, 27)).mul_(SECOND)
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Shift int64 to the right and fill with zeros. Torch shifts arithmetically, so a mask removes the copies of the
    sign.
    """
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def gumbel(draws: Iterable[tuple[int, int]], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Return standard Gumbel noise for each (seed, position): float64 `[draws, vocab]`."""
    return gumbel_of(draws, torch.arange(vocab, device=device))


def gumbel_of(draws: Iterable[tuple[int, int]], tokens: Tensor) -> Tensor:
    """Return the noise of some tokens, float64 `[draws, n]`. tokens: int64 `[n]`, or `[draws, n]` where they differ."""
    return gumbel_at(noise_keys(draws).unsqueeze(1).to(tokens.device, non_blocking=True), tokens)


def noise_keys(draws: Iterable[tuple[int, int]]) -> Tensor:
    """Return the keys of draws on the host: int64 `[draws]`."""
    return torch.tensor([noise_key(seed, position) for seed, position in draws], dtype=torch.int64)


def gumbel_at(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of pairs of a key and a token, int64 tensors that broadcast, as float64. The library's
    logarithm is used.
    """
    uniform = _shift_right(random_bits(keys, tokens), 12).double().add_(0.5).mul_(1 / FRACTION)
    return uniform.log_().neg_().log_().neg_()


def exact_gumbel_at(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the same noise by `exact_log`, which has the same bits on every processor."""
    uniform = _shift_right(random_bits(keys, tokens), 12).double().add_(0.5).mul_(1 / FRACTION)
    return exact_log(exact_log(uniform).neg_()).neg_()


def noise_order(key: Tensor, vocab: int) -> Tensor:
    """Return integers that order tokens by their noise, int64 `[vocab]` in 0..FRACTION - 1, without a logarithm."""
    return _shift_right(_mix(key + _token_steps(vocab)), 12)


@lru_cache(maxsize=2)
def _token_steps(vocab: int) -> Tensor:
    """Return what each token adds to a key."""
    return torch.arange(1, vocab + 1) * GOLDEN
