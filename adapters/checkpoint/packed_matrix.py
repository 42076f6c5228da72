"""Packed matrices as they are multiplied: what people's formats are brought into at load, where that loses nothing.

A number is step * scale - least, in float32, as its format has it. Steps have 4 or 8 bits; scales belong to groups of a
row's columns, and may be of two levels: one for several groups, times a small integer for each of them.
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

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES: Mapping[str, tuple[int, ...]] = {"uint4": tuple(range(16)), "int4": tuple(range(-8, 8)), "iq4": IQ4}
"""What steps of four bits stand for."""
GROUPS = (128, 64, 32, 16)  # columns of a group: products go through steps in runs of 16 at least


@frozen(order=True)
class StepLayout:
    """How the numbers of a matrix lie. steps: one of TABLES, or "int8", or "e4m3". group: columns of one. per: groups
    that share a scale. scale: its dtype. inner: each group has a factor of its own. least: what is subtracted is a
    small integer of each group times its scale ("scale"), or times a number of its own beside the scale ("own").
    """

    steps: str
    group: int
    per: int = 1
    scale: str = "float16"
    inner: bool = False
    least: Literal["", "scale", "own"] = ""

    @property
    def span(self) -> int:
        """Columns that share a scale."""
        return self.group * self.per

    @property
    def bits(self) -> float:
        """Of a number, with all that belongs to it."""
        levels = 8 * getattr(torch, self.scale).itemsize * (2 if self.least == "own" else 1) / self.span
        return (4 if self.steps in TABLES else 8) + levels + 8 * (self.inner + bool(self.least)) / self.group

    def __str__(self) -> str:
        return f"{self.steps} by {self.group}" + (f" of {self.span}" if self.per > 1 else "")

    def fits(self, columns: int) -> bool:
        return self.group in GROUPS and columns % self.span == 0


@frozen(eq=False)
class PackedMatrix:
    """`[N, K]`. steps: `[N, K]`, uint8 where they are places in a table or E4M3, else int8. scale, own:
    `[N, K / span]`. inner, least: int8 `[N, K / group]`. What the layout has not is None.
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

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
        """With every tensor changed: in the same way, where it is a choice of rows."""
        return PackedMatrix(self.layout, *(None if one is None else change(one) for one in self.tensors))  # type: ignore[arg-type]

    def levels(self) -> tuple[Tensor, Tensor | None]:
        """Scale and what is least of each group, float32 `[N, K / group]`."""
        outer = self.scale.float().repeat_interleave(self.layout.per, 1)
        scale = outer if self.inner is None else outer * self.inner.float()
        if self.least is None:
            return scale, None
        own = outer if self.own is None else self.own.float().repeat_interleave(self.layout.per, 1)
        return scale, own * self.least.float()

    def numbers(self) -> Tensor:
        """Steps as what they stand for, float32."""
        if self.layout.steps == "e4m3":
            return e4m3(self.steps)
        if self.layout.steps == "int8":
            return self.steps.float()
        return torch.tensor(TABLES[self.layout.steps], dtype=torch.float32, device=self.steps.device)[self.steps.int()]

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The numbers: in float32, then rounded once to what is computed in."""
        found = torch.empty(self.shape, dtype=dtype, device=self.steps.device)
        step = max(1, piece_of(found.device) // self.shape[1])
        for start in range(0, self.shape[0], step):
            part = self.mapped(lambda one, start=start: one[start : start + step])  # type: ignore[misc]
            scale, least = part.levels()
            values = part.numbers().view(len(scale), -1, self.layout.group).mul_(scale.unsqueeze(2))
            if least is not None:
                values -= least.unsqueeze(2)
            found[start : start + step].copy_(values.flatten(1))
        return found


@frozen(eq=False)
class Stack:
    """A weight of several tensors, one below the other, each packed or not. dtype, device: of what is unpacked."""

    parts: tuple[Tensor | PackedMatrix, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def joined(self) -> Stack:
        """With parts of one layout that follow each other as one."""
        found = list[Tensor | PackedMatrix]()
        for part in self.parts:
            before = found[-1] if found else None
            if isinstance(part, PackedMatrix) and isinstance(before, PackedMatrix) and part.layout == before.layout:
                pairs = zip(before.tensors, part.tensors, strict=True)
                found[-1] = PackedMatrix(part.layout, *(both(*pair) for pair in pairs))  # type: ignore[arg-type]
            else:
                found.append(part)
        return evolve(self, parts=tuple(found))

    def unpacked(self) -> Tensor:
        parts = [self.plain(part) for part in self.parts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def plain(self, part: Tensor | PackedMatrix) -> Tensor:
        return (part.unpacked(self.dtype) if isinstance(part, PackedMatrix) else part).to(self.device, self.dtype)


def piece_of(device: torch.device) -> int:
    """Numbers that are unpacked at once: on a processor what is in between stays in a core's cache, 1 << 18 twice as
    quick as 1 << 21; a GPU has enough to do.
    """
    return 1 << 18 if device.type == "cpu" else 1 << 24


def rows_of(part: Tensor | PackedMatrix, numbers: Tensor) -> Tensor | PackedMatrix:
    def chosen(one: Tensor) -> Tensor:
        return one.index_select(0, numbers.to(one.device))

    return part.mapped(chosen) if isinstance(part, PackedMatrix) else chosen(part)


def both(upper: Tensor | None, lower: Tensor | None) -> Tensor | None:
    return None if upper is None or lower is None else torch.cat((upper, lower))


@runtime_checkable
class PackedSource(WeightSource, Protocol):
    """Where packed weights can be had as they are packed."""

    def layout(self, name: str) -> StepLayout | None:
        """Of a tensor that can be had packed. From headers alone."""
        ...

    def packed(self, name: str) -> PackedMatrix:
        """One that has a layout. Raises CheckpointError."""
        ...


def group_of(group: int, columns: int) -> int:
    """The greatest run of columns that lies within groups of so many (0: of a whole row); 0: there is none."""
    common = math.gcd(group or columns, columns)
    return next((size for size in GROUPS if common % size == 0), 0)


def checked(matrix: PackedMatrix, where: object, name: str) -> PackedMatrix:
    """Raises CheckpointError for scales that are no numbers, or infinite."""
    for scale in (matrix.scale, matrix.own):
        if scale is not None:
            check_finite(scale, where, name)
    if matrix.layout.steps == "e4m3" and int((matrix.steps & 127).max()) == 127:
        raise CheckpointError(f"{where}: {name} has values that are no numbers, or infinite")
    return matrix


def rearranged(matrix: PackedMatrix, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
    """With rows, or columns by whole spans, in another order, as `change` has it of a matrix."""
    columns = matrix.shape[1]

    def moved(one: Tensor) -> Tensor:
        each = columns // one.shape[1]
        return change(one.repeat_interleave(each, 1) if each > 1 else one)[:, ::each].contiguous()

    return matrix.mapped(moved)


def e4m3(data: Tensor) -> Tensor:
    """The same bits are a float16 of a 256th of the value, subnormal ones too: a third of the time of a conversion."""
    signed = data.view(torch.int8).short()
    return (signed << 7 & ~(1 << 14)).view(torch.float16).float() * 256
