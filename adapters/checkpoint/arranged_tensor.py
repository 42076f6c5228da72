"""Tensors that are made of stored tensors by an exact rearrangement, on the host or on a device alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.packed_matrix import MXFP4, PackedMatrix, StepLayout, check_levels
from adapters.checkpoint.safetensors_folder import Fetch, TensorEntry

# The numbers of four bits of MXFP4, by their code: a sign, two bits of exponent and one of mantissa.
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT = 127  # the stored exponent of a scale of 1
NO_NUMBER = 255


@frozen
class ArrangedTensor:
    """A tensor that `arrange` makes of stored tensors. No number is rounded.

    pack: makes the tensor of them in packed form, in MXFP4; None: they are not packed.
    """

    parts: tuple[TensorEntry, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    arrange: Callable[[Sequence[Tensor]], Tensor]
    packing_name: str = ""
    pack: Callable[[Sequence[Tensor]], PackedMatrix] | None = None

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
    def layout(self) -> StepLayout | None:
        """The packed layout, if the tensor is a matrix of whole groups."""
        fits = self.pack is not None and len(self.shape) == 2 and MXFP4.fits(self.shape[1])
        return MXFP4 if fits else None

    def read_packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:
        """Return a tensor that has a layout, packed."""
        assert self.pack is not None
        found = self.pack([fetch(part, name) for part in self.parts]).map_tensors(Tensor.contiguous)
        assert found.shape == self.shape, (name, found.shape, self.shape)
        return check_levels(found, self.parts[0].file, name)

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


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> PackedMatrix:
    """Return the matrix that `unpack_mxfp4` unpacks, in packed form."""
    steps = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)
    return PackedMatrix(MXFP4, steps, scale_mxfp4(scales))


def scale_mxfp4(stored: Tensor) -> Tensor:
    """Return the scales of steps that are twice the numbers, bfloat16. The stored exponent 255 stands for no number."""
    exponents = stored.to(torch.int32) - EXPONENT - 1
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return scales.masked_fill(stored == NO_NUMBER, torch.nan).to(torch.bfloat16)
