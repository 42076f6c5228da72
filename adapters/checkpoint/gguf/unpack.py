"""What packed blocks stand for, as llama.cpp and its `gguf` package have it: steps, scales, and what is least.

A function gets blocks as bytes, `[blocks, size]`, and gives one row of a matrix for each. Its numbers are those of the
package to the last bit, since scale * step - least is taken in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout

K_SCALED = StepLayout("int8", 32, per=8, inner=True, least="own")
LAYOUTS: Mapping[str, StepLayout] = {
    "Q8_0": StepLayout("int8", 32),
    "Q4_0": StepLayout("int4", 32),
    "Q4_K": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "Q5_K": K_SCALED,
    "Q6_K": StepLayout("int8", 16, per=16, inner=True),
    "IQ4_NL": StepLayout("iq4", 32),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
}


def half(data: Tensor) -> Tensor:
    """Two bytes of each block are a float16: `[blocks, 1]`."""
    return data.contiguous().view(torch.float16)


def signed(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.int8)


def nibbles(data: Tensor, run: int) -> Tensor:
    """The low halves of each `run` bytes, then their high halves: `[blocks, 2 * bytes]`."""
    parts = data.view(len(data), -1, run)
    return torch.stack((parts & 15, parts >> 4), 2).flatten(1)


def q8_0(blocks: Tensor) -> PackedMatrix:
    return PackedMatrix(LAYOUTS["Q8_0"], signed(blocks[:, 2:]), half(blocks[:, :2]))


def q4_0(blocks: Tensor) -> PackedMatrix:
    return PackedMatrix(LAYOUTS["Q4_0"], nibbles(blocks[:, 2:], 16), half(blocks[:, :2]))


def scales_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them."""
    low, middle, high = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1)
    return signed(scales), signed(minima)


def affine_k(layout: StepLayout, blocks: Tensor, steps: Tensor) -> PackedMatrix:
    """Of a super-block: eight runs of 32 steps, each with its scale and its minimum."""
    scales, minima = scales_k(blocks[:, 4:16])
    return PackedMatrix(layout, steps, half(blocks[:, :2]), scales, minima, half(blocks[:, 2:4]))


def q4_k(blocks: Tensor) -> PackedMatrix:
    return affine_k(LAYOUTS["Q4_K"], blocks, nibbles(blocks[:, 16:], 32))


def q5_k(blocks: Tensor) -> PackedMatrix:
    fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    return affine_k(K_SCALED, blocks, signed(nibbles(blocks[:, 48:], 32) | (fifth << 4).flatten(1)))


def q6_k(blocks: Tensor) -> PackedMatrix:
    """Two halves of 128: four runs of 32, whose low four bits are in 64 bytes and whose high two are in 32."""
    low = nibbles(blocks[:, :128], 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).flatten(1)
    steps = (low | (high << 4)).to(torch.int8) - 32
    return PackedMatrix(LAYOUTS["Q6_K"], steps, half(blocks[:, 208:]), signed(blocks[:, 192:208]))


def iq4_nl(blocks: Tensor) -> PackedMatrix:
    return PackedMatrix(LAYOUTS["IQ4_NL"], nibbles(blocks[:, 2:], 16), half(blocks[:, :2]))


def iq4_xs(blocks: Tensor) -> PackedMatrix:
    """Eight runs of 32, each with a scale of six bits: four in a half byte, two in a number of 16 bits."""
    twos = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    halves = torch.arange(0, 8, 4, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, 2:4].contiguous().view(torch.int16).int() >> twos & 3
    low = (blocks[:, 4:8, None] >> halves & 15).flatten(1).int()
    scale = ((low | (high << 4)) - 32).to(torch.int8)
    return PackedMatrix(LAYOUTS["IQ4_XS"], nibbles(blocks[:, 8:], 16), half(blocks[:, :2]), scale)


UNPACK: Mapping[str, Callable[[Tensor], PackedMatrix]] = {
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
