"""The state that a model keeps of a sequence, as data: names, shapes and element types of tensors. Imports no torch.

Element types have the names of safetensors, so that a tool that reads a cache folder needs no library for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

# Bytes of an element, by element type.
ELEMENT_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}
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
    """One tensor of a model's state."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@frozen
class RowSpec:
    """The rows that one model keeps of every token: each of `names` is a tensor `[heads, tokens, width]` of `dtype`.

    The names are the keys and the values of each layer in turn, in the order in which rows are stored. If the two have
    different formats, they have one name together. In I8 and F8_E4M3 the last four bytes of a head's `width` are the
    float32 scale of its codes. U8 stands for packed codes with a scale, and for rows of two formats.
    """

    names: tuple[str, ...]
    heads: int
    width: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        return len(self.names) * self.heads * self.width * ELEMENT_BYTES[self.dtype]

    def tensor_specs(self, tokens: int) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, self.dtype, (self.heads, tokens, self.width)) for name in self.names)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an element type, one of ELEMENT_BYTES."""
    import torch  # noqa: PLC0415 - importing takes a second, and this is called only where there are tensors

    found = getattr(torch, _TORCH[name])
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the element type of a torch dtype, one of ELEMENT_BYTES."""
    return _NAMES[str(dtype)]
