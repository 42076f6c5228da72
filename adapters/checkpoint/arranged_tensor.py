"""Tensors that are made of stored tensors by an exact rearrangement, on the host or on a device alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import PackedMatrix
from adapters.checkpoint.safetensors_folder import Fetch, TensorEntry

# The numbers of four bits of MXFP4, by their code: a sign, two bits of exponent and one of mantissa.
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT = 127  # the stored exponent of a scale of 1


@frozen
class ArrangedTensor:
    """A tensor that `arrange` makes of stored tensors. No number is rounded."""

    parts: tuple[TensorEntry, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    arrange: Callable[[Sequence[Tensor]], Tensor]
    packing_name: str = ""

    @property
    def files(self) -> Mapping[Path, int]:
        return {part.file: part.header for part in self.parts}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        return self.parts

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        """Return the tensor. name: for error messages."""
        found = self.arrange([fetch(part, name) for part in self.parts]).contiguous()
        assert found.shape == self.shape, (name, found.shape, self.shape)
        check_finite(found, self.parts[0].file, name)
        return found

    @property
    def layout(self) -> None:
        return None

    def read_packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:  # noqa: ARG002
        raise AssertionError(f"{name} is not packed as products read it")

    def with_dtype(self, dtype: torch.dtype) -> ArrangedTensor:  # noqa: ARG002 - bfloat16 holds every number of MXFP4
        return self


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks of 32, bfloat16 `[rows, 32 * n]`: exactly, since each has one bit of mantissa.

    blocks: uint8 `[rows, n, 16]`, the lower half of a byte first. scales: uint8 `[rows, n]`, powers of two.
    """
    table = torch.tensor(FOUR_BITS, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    exponents = scales.to(torch.int32).unsqueeze(-1) - EXPONENT
    return torch.ldexp(table[codes], exponents).to(torch.bfloat16).flatten(-2)
