"""Rotary embedding: frequencies as families scale them, and the tables that kernels read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_positive, read_rope
from adapters.models.kernels.interfaces.layer_interface import Rope


@frozen
class Linear:
    """Positions are divided by `factor`."""

    factor: float

    def scale(self, powers: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - not every scaling looks at theta
        return 1.0 / powers / self.factor


@frozen
class Llama3:
    """Wavelengths above original / low are multiplied by `factor`, and those below original / high are kept.

    Between the two, frequencies are interpolated.
    """

    factor: float
    low: float
    high: float
    original: float

    def scale(self, powers: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        plain = 1.0 / powers
        wavelengths = 2 * math.pi / plain
        stretched = torch.where(wavelengths > self.original / self.low, plain / self.factor, plain)
        smooth = (self.original / wavelengths - self.low) / (self.high - self.low)
        ramp = (1 - smooth) * stretched / self.factor + smooth * stretched
        between = (wavelengths >= self.original / self.high) & (wavelengths <= self.original / self.low)
        return torch.where(between, ramp, stretched)


@frozen
class Yarn:
    """Frequencies with many turns within `original` positions are kept, and those with few are divided by `factor`.

    fast, slow: the numbers of turns at the two ends of the ramp between them. attention: the factor of cosines and
    sines. truncate: the ramp starts and ends at whole pairs of numbers.
    """

    factor: float
    original: float
    fast: float
    slow: float
    attention: float
    truncate: bool

    def scale(self, powers: Tensor, theta: float) -> Tensor:
        head = 2 * len(powers)
        low, high = (
            head * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head - 1)
        width = high - low or 0.001
        kept = 1 - ((torch.arange(head // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


@frozen
class Divided:
    """Each frequency is divided by a factor of its own, which GGUF files contain."""

    factors: tuple[float, ...]

    def scale(self, powers: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        return 1.0 / powers / torch.tensor(self.factors)


@frozen
class Proportional:
    """Only the first `pairs` of a head's pairs are rotated, by frequencies as if all were; the others stay.

    Frequencies are divided by `factor`.
    """

    pairs: int
    factor: float = 1.0

    def scale(self, powers: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        found = 1.0 / powers / self.factor
        found[self.pairs :] = 0.0
        return found


# How a family scales its frequencies. `scale(powers, theta)` returns the frequency of each pair of numbers in radians
# per position, float32 `[hd / 2]`. powers: theta ** (2 i / hd) for the pair i, so unscaled frequencies are 1 / powers.
Scaling: TypeAlias = Linear | Llama3 | Yarn | Divided | Proportional


@frozen
class Rotary:
    """Half-split rotary embedding over the first `head_dim` numbers of a head, at absolute positions."""

    head_dim: int
    theta: float
    scaling: Scaling | None = None

    def tables(self, positions: int, device: torch.device) -> Rope:
        """Return the tables of cosines and sines, for this many positions.

        They are computed on the host in float32, with the operations of transformers, so every device has the same.
        """
        frequencies, attention = self.frequencies()
        angles = torch.outer(torch.arange(positions).float(), frequencies)
        cos = angles.cos()
        sin = angles.sin_()
        if attention != 1:
            cos = cos.mul_(attention)
            sin = sin.mul_(attention)
        return Rope(cos.to(device), sin.to(device))

    def frequencies(self) -> tuple[Tensor, float]:
        """Return the frequencies, float32 `[hd / 2]`, and the factor of cosines and sines."""
        powers = self.theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim)
        if self.scaling is None:
            return 1.0 / powers, 1.0
        attention = self.scaling.attention if isinstance(self.scaling, Yarn) else 1.0
        return self.scaling.scale(powers, self.theta), attention


@frozen
class ScaledRotary(Rotary):
    """Rotary embedding whose queries are scaled by position, as in Llama 4.

    The factor is 1 + beta * log(1 + floor(position / original)), which is 1 for the first `original` positions.
    """

    beta: float = field(kw_only=True)
    original: int = field(kw_only=True)

    def tables(self, positions: int, device: torch.device) -> Rope:
        found = super().tables(positions, device)
        if positions <= self.original:
            return found
        spans = torch.floor(torch.arange(positions) / self.original)
        return evolve(found, query_scale=(1 + self.beta * torch.log(1 + spans)).to(device))


def count_rotated(head_dim: int, part: float) -> int:
    """Return how many numbers of a head are rotated if this part of it is. Raises CheckpointError."""
    rotated = int(head_dim * part)
    if rotated < 2 or rotated % 2:
        raise CheckpointError(f"config.json: {rotated} of {head_dim} numbers of a head are rotated; it must be pairs")
    return rotated


def parse_rope(
    raw: Mapping[str, Any], accepted: Sequence[str], theta: float | None = None, partial: float | None = None
) -> tuple[float, Scaling | None]:
    """Read theta and the scaling from a config.json. Raises CheckpointError.

    accepted: the rope types that the family supports. theta: the default; None if config.json must give it. partial: as
    in `read_rope`.
    """
    rope = read_rope(raw, accepted, theta, partial)
    base = rope["rope_theta"]
    kind = rope["rope_type"]
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, Linear(_number(rope, "factor"))
    if kind == "llama3":
        low = _number(rope, "low_freq_factor")
        high = _number(rope, "high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
        return base, Llama3(_number(rope, "factor"), low, high, _number(rope, "original_max_position_embeddings"))
    return base, _yarn(rope, raw.get("max_position_embeddings"), base)


def _number(rope: Mapping[str, Any], name: str) -> float:
    if rope.get(name) is None:
        raise CheckpointError(f"config.json: {name} of rope type {rope['rope_type']!r} is missing")
    return read_positive(rope[name], name)


def _yarn(rope: Mapping[str, Any], longest: object, theta: float) -> Yarn:
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta {theta:g} is not above 1")
    given = rope.get("original_max_position_embeddings")
    original = read_positive(longest if given is None else given, "original_max_position_embeddings")
    factor = rope.get("factor")
    if factor is None and longest is not None:
        factor = read_positive(longest, "max_position_embeddings") / original
    factor = read_positive(factor, "factor")
    truncate = rope.get("truncate")
    if truncate is not None and not isinstance(truncate, bool):
        raise CheckpointError(f"config.json: truncate {repr(truncate)[:40]} is not true or false")
    return Yarn(
        factor=factor,
        original=original,
        fast=read_positive(rope.get("beta_fast") or 32, "beta_fast"),
        slow=read_positive(rope.get("beta_slow") or 1, "beta_slow"),
        attention=_attention_factor(rope, factor),
        truncate=truncate is not False,
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines: the given one, or the one that the YaRN paper recommends for `factor`."""
    given = rope.get("attention_factor")
    if given is not None:
        return read_positive(given, "attention_factor")

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _recommend(factor, _number(rope, "mscale")) / _recommend(factor, _number(rope, "mscale_all_dim"))
    return _recommend(factor, 1.0)


def scale_attention(rope: Mapping[str, Any], name: str) -> float:
    """Return the factor of attention that the YaRN paper recommends, with a weight that the file gives by `name`."""
    return _recommend(_number(rope, "factor"), _number(rope, name))


def _recommend(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
