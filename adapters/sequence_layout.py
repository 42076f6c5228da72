"""What a model keeps of a sequence, as data: names, shapes and element types of tensors. Imports no torch.

Element types are called as in safetensors, so that whoever only looks at a cache folder needs no library for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

# Bytes of an element.
SIZES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}
_TORCH = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
}
_NAMES = {f"torch.{long}": short for short, long in _TORCH.items()}


@frozen
class TensorSpec:
    """One tensor as our own model makes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


@frozen
class RowSpec:
    """What one model keeps of every token: each of `names` is `[heads, tokens, width]` of `dtype`.

    The names are a layer's keys and its values in turn, and say the order in which rows lie end to end. In I8 and
    F8_E4M3 the last four bytes of a head's `width` are the float32 that its codes are multiplied with.
    """

    names: tuple[str, ...]
    heads: int
    width: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        return len(self.names) * self.heads * self.width * SIZES[self.dtype]

    def specs(self, tokens: int) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, self.dtype, (self.heads, tokens, self.width)) for name in self.names)


def torch_dtype(name: str) -> torch.dtype:
    """Of one of `SIZES`."""
    import torch  # noqa: PLC0415 - it takes a second, and only those who have tensors come here

    found = getattr(torch, _TORCH[name])
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """One of `SIZES`."""
    return _NAMES[str(dtype)]
