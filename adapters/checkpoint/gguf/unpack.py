"""What packed blocks stand for: the float32 numbers that llama.cpp and its `gguf` package say, to the last bit.

A function gets blocks as bytes, `[blocks, size]`, and gives numbers, `[blocks, count]`. Products and differences are
taken in the package's order, so that they round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen steps of IQ4 stand for."""
PAIRS = torch.tensor([[IQ4[byte & 15], IQ4[byte >> 4]] for byte in range(256)], dtype=torch.float32)
"""And both halves of a byte: looked up at once, they take half the time."""


def half(data: Tensor) -> Tensor:
    """Two bytes of each block are a float16: `[blocks, 1]`."""
    return data.contiguous().view(torch.float16).float()


def signed(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.int8)


def nibbles(data: Tensor, run: int) -> Tensor:
    """The low halves of each `run` bytes, then their high halves: `[blocks, 2 * bytes]`."""
    runs = data.view(len(data), -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1)


def q8_0(blocks: Tensor) -> Tensor:
    return signed(blocks[:, 2:]).float() * half(blocks[:, :2])


def q4_0(blocks: Tensor) -> Tensor:
    return half(blocks[:, :2]) * (nibbles(blocks[:, 2:], 16).to(torch.int8) - 8).float()


def scales_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them."""
    low, middle, high = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1)
    return scales.float(), minima.float()


def affine_k(blocks: Tensor, steps: Tensor) -> Tensor:
    """Of a super-block: eight runs of 32 steps, each with its scale and its minimum."""
    scales, minima = scales_k(blocks[:, 4:16])
    scale, least = half(blocks[:, :2]) * scales, half(blocks[:, 2:4]) * minima
    return (scale[:, :, None] * steps.view(-1, 8, 32).float() - least[:, :, None]).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    return affine_k(blocks, nibbles(blocks[:, 16:], 32))


def q5_k(blocks: Tensor) -> Tensor:
    fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return affine_k(blocks, nibbles(blocks[:, 48:], 32) | (fifth << 4).flatten(1))


def q6_k(blocks: Tensor) -> Tensor:
    """Two halves of 128: four runs of 32, whose low four bits are in 64 bytes and whose high two are in 32."""
    low = nibbles(blocks[:, :128], 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).flatten(1)
    steps = (low | (high << 4)).to(torch.int8) - 32
    scale = half(blocks[:, 208:]) * signed(blocks[:, 192:208]).float()
    return (scale[:, :, None] * steps.view(-1, 16, 16).float()).flatten(1)


def iq4(data: Tensor) -> Tensor:
    """As `nibbles` of each 16 bytes, but what they stand for."""
    pairs = PAIRS.index_select(0, data.flatten().int()).view(len(data), -1, 16, 2)
    return pairs.transpose(2, 3).flatten(1)


def iq4_nl(blocks: Tensor) -> Tensor:
    return half(blocks[:, :2]) * iq4(blocks[:, 2:])


def iq4_xs(blocks: Tensor) -> Tensor:
    """Eight runs of 32, each with a scale of six bits: four in a half byte, two in a number of 16 bits."""
    high = blocks[:, 2:4].contiguous().view(torch.int16).int() >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    low = (blocks[:, 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(1).int()
    scale = half(blocks[:, :2]) * ((low | (high << 4)) - 32).float()
    return (scale[:, :, None] * iq4(blocks[:, 8:]).view(-1, 8, 32)).flatten(1)


UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are read as they are stored."""
