"""Unpacks the blocks of GGUF types to steps, scales and minima, as llama.cpp and its `gguf` package define them.

A function takes blocks as bytes, `[blocks, size]`, and returns a matrix with one row for each block. The weights are
equal to those of the package to the last bit, since `scale * step - least` is computed in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adapters.checkpoint.arranged_tensor import scale_mxfp4
from adapters.checkpoint.packed_matrix import MXFP4, PackedMatrix, StepLayout

K_SCALED = StepLayout("int8", 32, per=8, inner=True, least="own")
LAYOUTS: Mapping[str, StepLayout] = {
    "Q8_0": StepLayout("int8", 32),
    "Q4_0": StepLayout("int4", 32),
    "Q4_K": StepLayout("uint4", 32, per=8, inner=True, least="own"),
    "Q5_K": K_SCALED,
    "Q6_K": StepLayout("int8", 16, per=16, inner=True),
    "IQ4_NL": StepLayout("iq4", 32),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
    "MXFP4": MXFP4,
}


def view_float16(data: Tensor) -> Tensor:
    """Return two bytes of each block as a float16, `[blocks, 1]`."""
    return data.contiguous().view(torch.float16)


def view_int8(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.int8)


def split_nibbles(data: Tensor, run: int) -> Tensor:
    """Return the low halves of each `run` bytes and then their high halves, `[blocks, 2 * bytes]`."""
    parts = data.view(len(data), -1, run)
    return torch.stack((parts & 15, parts >> 4), 2).flatten(1)


def unpack_q8_0(blocks: Tensor) -> PackedMatrix:
    return PackedMatrix(LAYOUTS["Q8_0"], view_int8(blocks[:, 2:]), view_float16(blocks[:, :2]))


def unpack_q4_0(blocks: Tensor) -> PackedMatrix:
    return PackedMatrix(LAYOUTS["Q4_0"], split_nibbles(blocks[:, 2:], 16), view_float16(blocks[:, :2]))


def unpack_k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits each, which Q4_K and Q5_K store in 12 bytes."""
    low = data[:, :4]
    middle = data[:, 4:8]
    high = data[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1)
    return view_int8(scales), view_int8(minima)


def unpack_affine_k(layout: StepLayout, blocks: Tensor, steps: Tensor) -> PackedMatrix:
    """Return the matrix of super-blocks: eight runs of 32 steps, each with its scale and its minimum."""
    scales, minima = unpack_k_scales(blocks[:, 4:16])
    return PackedMatrix(layout, steps, view_float16(blocks[:, :2]), scales, minima, view_float16(blocks[:, 2:4]))


def unpack_q4_k(blocks: Tensor) -> PackedMatrix:
    return unpack_affine_k(LAYOUTS["Q4_K"], blocks, split_nibbles(blocks[:, 16:], 32))


def unpack_q5_k(blocks: Tensor) -> PackedMatrix:
    fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    return unpack_affine_k(K_SCALED, blocks, view_int8(split_nibbles(blocks[:, 48:], 32) | (fifth << 4).flatten(1)))


def unpack_q6_k(blocks: Tensor) -> PackedMatrix:
    """Unpack two halves of 128 steps: four runs of 32, with the low 4 bits in 64 bytes and the high 2 in 32."""
    low = split_nibbles(blocks[:, :128], 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).flatten(1)
    steps = (low | (high << 4)).to(torch.int8) - 32
    return PackedMatrix(LAYOUTS["Q6_K"], steps, view_float16(blocks[:, 208:]), view_int8(blocks[:, 192:208]))


def unpack_iq4_nl(blocks: Tensor) -> PackedMatrix:
    return PackedMatrix(LAYOUTS["IQ4_NL"], split_nibbles(blocks[:, 2:], 16), view_float16(blocks[:, :2]))


def unpack_iq4_xs(blocks: Tensor) -> PackedMatrix:
    """Unpack eight runs of 32 steps. Each has a scale of 6 bits: 4 in half a byte, and 2 in an integer of 16 bits."""
    twos = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    halves = torch.arange(0, 8, 4, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, 2:4].contiguous().view(torch.int16).int() >> twos & 3
    low = (blocks[:, 4:8, None] >> halves & 15).flatten(1).int()
    scale = ((low | (high << 4)) - 32).to(torch.int8)
    return PackedMatrix(LAYOUTS["IQ4_XS"], split_nibbles(blocks[:, 8:], 16), view_float16(blocks[:, :2]), scale)


def unpack_mxfp4(blocks: Tensor) -> PackedMatrix:
    """Unpack the exponent of a scale, and 16 bytes, each with a number of either half of the block."""
    return PackedMatrix(LAYOUTS["MXFP4"], split_nibbles(blocks[:, 1:], 16), scale_mxfp4(blocks[:, :1]))


UNPACK: Mapping[str, Callable[[Tensor], PackedMatrix]] = {
    "Q8_0": unpack_q8_0,
    "Q4_0": unpack_q4_0,
    "Q4_K": unpack_q4_k,
    "Q5_K": unpack_q5_k,
    "Q6_K": unpack_q6_k,
    "IQ4_NL": unpack_iq4_nl,
    "IQ4_XS": unpack_iq4_xs,
    "MXFP4": unpack_mxfp4,
}
NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
"""The types that are not packed."""
