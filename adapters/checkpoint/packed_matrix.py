"""The packed form in which matrices are multiplied. Published formats are converted to it at load, without loss.

Theory of operation. Published files pack weights in many formats, and kernels must not have one product for each. What
the formats have in common is a formula: a weight is `step * scale - least` in float32, in the order of its format.

* A step has 4 or 8 bits. Four bits index a table of 16 values.
* A scale belongs to a group of columns of one row. Scales may have two levels: a scale for several groups, times a
  small integer per group.
* `least` is nothing, or a number per group: an integer times the scale, or an integer times a number of its own.

`StepLayout` says which of these a matrix has, and `PackedMatrix` holds the numbers. Invariant: unpacking this form
gives exactly the weights that unpacking the published format gives.

Example: a Q4_K block of GGUF has 8 groups of 32 columns, one scale and one minimum in float16 for all of them, and
integer factors of 6 bits per group. It is `StepLayout("uint4", 32, per=8, inner=True, least="own")`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.weight_source import WeightSource

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of MXFP4, so that they are whole. Its scales are halved in turn."""
TABLES: Mapping[str, tuple[int, ...]] = {
    "uint4": tuple(range(16)),
    "int4": tuple(range(-8, 8)),
    "iq4": IQ4_VALUES,
    "e2m1": E2M1_VALUES,
}
"""The values of steps of four bits, by the name of their table."""
GROUPS = (128, 64, 32, 16)  # columns in a group: products go through steps in runs of at least 16


@frozen(order=True)
class StepLayout:
    """The layout of a packed matrix.

    steps: the type of a step: one of TABLES, "int8" or "e4m3".
    group: number of columns in a group.
    per: number of groups that share a scale.
    scale: the dtype of a scale.
    inner: each group has an integer factor of its own.
    least: what is subtracted. "": nothing. "scale": an integer per group, times the scale (the zero point of GPTQ and
    AWQ). "own": an integer per group, times a second number that is stored like the scale (the minimum of GGUF's K
    types).
    rounds_rows: the file asks that rows are multiplied in E4M3 as well, each group with a scale of its own. As many
    rows of the matrix as a group has columns share a scale then. Devices without such products multiply as ever.
    """

    steps: str
    group: int
    per: int = 1
    scale: str = "float16"
    inner: bool = False
    least: Literal["", "scale", "own"] = ""
    rounds_rows: bool = False

    @property
    def span(self) -> int:
        """The number of columns that share a scale: a super-block of GGUF's K types, else a group."""
        return self.group * self.per

    @property
    def bits(self) -> float:
        """The average number of bits of one weight, with its share of the scales."""
        levels = 8 * getattr(torch, self.scale).itemsize * (2 if self.least == "own" else 1) / self.span
        return (4 if self.steps in TABLES else 8) + levels + 8 * (self.inner + bool(self.least)) / self.group

    def __str__(self) -> str:
        return f"{self.steps} by {self.group}" + (f" of {self.span}" if self.per > 1 else "")

    def fits(self, columns: int) -> bool:
        return self.group in GROUPS and columns % self.span == 0


MXFP4 = StepLayout("e2m1", 32, scale="bfloat16")


@frozen(eq=False)
class PackedMatrix:
    """A packed matrix of shape `[N, K]`. A tensor that the layout does not have is None.

    steps: `[N, K]`, uint8 for indexes into a table and for E4M3, or else int8.
    scale, own: `[N, K / span]`.
    inner, least: int8 `[N, K / group]`.
    """

    layout: StepLayout
    steps: Tensor
    scale: Tensor
    inner: Tensor | None = None
    least: Tensor | None = None
    own: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.steps.shape[0], self.steps.shape[1]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.steps, self.scale, self.inner, self.least, self.own

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
        """Return the matrix with `change` applied to every tensor. It must select rows, or keep the layout valid."""
        return PackedMatrix(self.layout, *(None if tensor is None else change(tensor) for tensor in self.tensors))  # type: ignore[arg-type]

    def group_levels(self) -> tuple[Tensor, Tensor | None]:
        """Return the scale and the subtracted value of each group, float32 `[N, K / group]`."""
        outer = self.scale.float().repeat_interleave(self.layout.per, 1)
        scale = outer if self.inner is None else outer * self.inner.float()
        if self.least is None:
            return scale, None
        own = outer if self.own is None else self.own.float().repeat_interleave(self.layout.per, 1)
        return scale, own * self.least.float()

    def step_values(self) -> Tensor:
        """Return the values that the steps stand for, float32 `[N, K]`."""
        if self.layout.steps == "e4m3":
            return decode_e4m3(self.steps)
        if self.layout.steps == "int8":
            return self.steps.float()
        return torch.tensor(TABLES[self.layout.steps], dtype=torch.float32, device=self.steps.device)[self.steps.int()]

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weights: computed in float32 and then rounded once to `dtype`."""
        found = torch.empty(self.shape, dtype=dtype, device=self.steps.device)
        step = max(1, choose_piece_size(found.device) // self.shape[1])
        for start in range(0, self.shape[0], step):
            part = self.map_tensors(lambda tensor, start=start: tensor[start : start + step])  # type: ignore[misc]
            scale, least = part.group_levels()
            values = part.step_values().view(len(scale), -1, self.layout.group).mul_(scale.unsqueeze(2))
            if least is not None:
                values -= least.unsqueeze(2)
            found[start : start + step].copy_(values.flatten(1))
        return found


@frozen(eq=False)
class StackedWeight:
    """A weight that consists of several matrices, one below the other, each packed or not.

    dtype, device: those of the unpacked weight.
    """

    parts: tuple[Tensor | PackedMatrix, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def merge_parts(self) -> StackedWeight:
        """Return the weight with neighbouring parts of the same layout joined to one part."""
        found = list[Tensor | PackedMatrix]()
        for part in self.parts:
            before = found[-1] if found else None
            if isinstance(part, PackedMatrix) and isinstance(before, PackedMatrix) and part.layout == before.layout:
                pairs = zip(before.tensors, part.tensors, strict=True)
                found[-1] = PackedMatrix(part.layout, *(concatenate_rows(*pair) for pair in pairs))  # type: ignore[arg-type]
            else:
                found.append(part)
        return evolve(self, parts=tuple(found))

    def unpack(self) -> Tensor:
        parts = [self.unpack_part(part) for part in self.parts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def unpack_part(self, part: Tensor | PackedMatrix) -> Tensor:
        return (part.unpack(self.dtype) if isinstance(part, PackedMatrix) else part).to(self.device, self.dtype)


def choose_piece_size(device: torch.device) -> int:
    """Return how many weights are unpacked at once.

    On a CPU the intermediate tensors should stay in a core's cache: 1 << 18 is twice as fast as 1 << 21. On a GPU
    pieces are larger, so that it has enough to do.
    """
    return 1 << 18 if device.type == "cpu" else 1 << 24


def select_rows(part: Tensor | PackedMatrix, numbers: Tensor) -> Tensor | PackedMatrix:
    def select(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, numbers.to(tensor.device))

    return part.map_tensors(select) if isinstance(part, PackedMatrix) else select(part)


def concatenate_rows(upper: Tensor | None, lower: Tensor | None) -> Tensor | None:
    return None if upper is None or lower is None else torch.cat((upper, lower))


@runtime_checkable
class PackedSource(WeightSource, Protocol):
    """A source of weights that can also return them packed."""

    def find_layout(self, name: str) -> StepLayout | None:
        """Return the layout of a tensor that can be read packed, or None. Reads headers only."""
        ...

    def read_packed(self, name: str) -> PackedMatrix:
        """Read a tensor that has a layout. Raises CheckpointError."""
        ...


def find_group_size(group: int, columns: int) -> int:
    """Return the greatest of GROUPS that divides the groups of a file, or 0 where there is none.

    group: columns in a group of the file. 0: the whole row is one group.
    """
    common = math.gcd(group or columns, columns)
    return next((size for size in GROUPS if common % size == 0), 0)


def check_levels(matrix: PackedMatrix, where: object, name: str) -> PackedMatrix:
    """Return the matrix, or raise CheckpointError where scales or E4M3 steps are not finite."""
    for scale in (matrix.scale, matrix.own):
        if scale is not None:
            check_finite(scale, where, name)
    if matrix.layout.steps == "e4m3" and int((matrix.steps & 127).max()) == 127:
        raise CheckpointError(f"{where}: {name} has values that are no numbers, or infinite")
    return matrix


def rearrange(matrix: PackedMatrix, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
    """Return the matrix with its rows, or whole spans of columns, in another order.

    change: puts the rows or columns of a matrix in the new order.
    """
    columns = matrix.shape[1]

    def move(tensor: Tensor) -> Tensor:
        group_size = columns // tensor.shape[1]
        changed = change(tensor.repeat_interleave(group_size, 1) if group_size > 1 else tensor)
        return changed[:, ::group_size].contiguous()

    return matrix.map_tensors(move)


def decode_e4m3(data: Tensor) -> Tensor:
    """Return the values of E4M3 bytes as float32.

    The same bits are a float16 of a 256th of the value, for subnormal values as well. This takes a third of the time of
    a conversion.
    """
    signed = data.view(torch.int8).short()
    return (signed << 7 & ~(1 << 14)).view(torch.float16).float() * 256
