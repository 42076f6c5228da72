"""The instructions that kernels write themselves (PTX), run on tensors: what the manual says that each of them does.

A register is an int64 tensor with 32 bits in it, none of them negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ALL = 0xFFFFFFFF
STATEMENT = re.compile(r"([a-z][\w.]*)\s+(.*)", re.DOTALL)


def as_register(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        value = value.as_subclass(Tensor)
        value = value.view(torch.int32) if value.dtype == torch.float32 else value
    return torch.as_tensor(value).long() & ALL


def from_register(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(dtype)


def as_halves(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers in the lower and in the upper half of a register, exactly in float64."""
    halves = (from_register(half << 16, torch.int32) >> 16 for half in (bits & 0xFFFF, bits >> 16))
    low, high = (half.to(torch.int16).view(dtype).double() for half in halves)
    return low, high


def join_halves(low: Tensor, high: Tensor) -> Tensor:
    low, high = (half.view(torch.int16).long() & 0xFFFF for half in (low, high))
    return low | high << 16


def pick_bytes(a: Tensor, b: Tensor, chosen: Tensor) -> Tensor:
    found = torch.zeros_like(a + b + chosen)
    for place in range(4):
        number = chosen >> (4 * place) & 15
        byte = torch.where(number & 4 > 0, b, a) >> (8 * (number & 3)) & 255
        sign = torch.where(byte > 127, 255, 0)
        found = found | torch.where(number & 8 > 0, sign, byte) << (8 * place)
    return found


def combine_bits(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    found = torch.zeros_like(a + b + c)
    for row in range(8):
        if int(table) >> row & 1:
            parts = (one if row & bit else ~one & ALL for one, bit in ((a, 4), (b, 2), (c, 1)))
            x, y, z = parts
            found = found | x & y & z
    return found


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    parts = zip(*(as_halves(one, torch.bfloat16) for one in (a, b, c)), strict=True)
    low, high = ((x * y + z).float().bfloat16() for x, y, z in parts)
    return join_halves(low, high)


def round_to_pair(high: Tensor, low: Tensor) -> Tensor:
    return join_halves(*(from_register(one, torch.float32).bfloat16() for one in (low, high)))


def widen_e4m3(pair: Tensor) -> Tensor:
    parts = ((pair >> shift & 255).to(torch.uint8).view(torch.float8_e4m3fn).half() for shift in (0, 8))
    return join_halves(*parts)


def add_pairs(a: Tensor, b: Tensor) -> Tensor:
    parts = zip(*(as_halves(one, torch.bfloat16) for one in (a, b)), strict=True)
    return join_halves(*((x + y).float().bfloat16() for x, y in parts))


def multiply_pairs(a: Tensor, b: Tensor) -> Tensor:
    parts = zip(*(as_halves(one, torch.bfloat16) for one in (a, b)), strict=True)
    return join_halves(*((x * y).float().bfloat16() for x, y in parts))


def take_of_lane(number: Tensor, lane: Tensor, _window: Tensor, _mask: Tensor) -> Tensor:
    """What another lane of the same four has. Lanes are the last dimension but one."""
    lane = lane + torch.zeros_like(number)  # in the shape of both
    return torch.take_along_dim(number + torch.zeros_like(lane), lane, -2)


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "prmt.b32": pick_bytes,
    "lop3.b32": combine_bits,
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & ALL,
    "shr.u32": lambda a, b: a >> b,
    "add.rn.bf16x2": add_pairs,
    "mul.rn.bf16x2": multiply_pairs,
    "shf.r.wrap.b32": lambda low, high, count: ((high << 32 | low) >> count) & ALL,
    "fma.rn.bf16x2": multiply_add,
    "cvt.rn.bf16x2.f32": round_to_pair,
    "cvt.rn.f16x2.e4m3x2": widen_e4m3,
    "shfl.sync.idx.b32": take_of_lane,
    "cvt.f32.f16": lambda a: as_register(as_halves(a, torch.float16)[0].float()),
}


def run_instructions(text: str, _constraints: str, args: list[Any], *, dtype: Any, **_: Any) -> Any:
    """Run `gl.inline_asm_elementwise`. dtype: of the result, or of each one."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    registers = {f"${len(dtypes) + number}": as_register(value) for number, value in enumerate(args)}
    for line in text.strip().strip("{}").split(";"):
        statement = STATEMENT.fullmatch(line.strip())
        if statement is None:
            continue  # nothing, or registers that are declared
        name, operands = statement.groups()
        if name == "bar.warp.sync":
            continue  # all lanes of a warp are here at once
        if name == "mov.b32" and operands.startswith("{"):  # a register is taken apart
            parts, source = operands.rsplit(",", 1)
            low, high = (part.strip() for part in parts.strip("{} ").split(","))
            whole = registers[source.strip()]
            registers[low], registers[high] = whole & 0xFFFF, whole >> 16
            continue
        if name == "mov.b32" and operands.endswith("}"):  # a register is put together
            to, parts = (part.strip("{} ") for part in operands.split(",", 1))
            low, high = (registers[part.strip()] for part in parts.split(","))
            registers[to] = low | high << 16
            continue
        to, *sources = (one.strip() for one in operands.split(","))
        found = [registers[one] if one in registers else as_register(int(one, 0)) for one in sources]
        registers[to] = INSTRUCTIONS[name](*found)
    results = tuple(from_register(registers[f"${number}"], one) for number, one in enumerate(dtypes))
    return results if isinstance(dtype, tuple) else results[0]
