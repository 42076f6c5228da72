"""What packed matrices stand for: (step - zero point) * scale, in float32, a product that is rounded once.

A step has 8 bits at most and a scale of float16 or bfloat16 has 11, so with those nothing is rounded at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, e4m3
from adapters.checkpoint.quantised.quantisation_config import Awq, Gptq, Int32Words, Packing, Scaled

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word the first of eight outputs is, the second ..."""


@frozen
class Grid:
    """A matrix `[outputs, inputs]`. steps: its rows `[start, stop)`, as whole numbers, or as bytes of E4M3. scale: as
    it is stored, and zero, float32: of each block of `block` rows and each group of columns. group: of each column.
    """

    steps: Callable[[int, int], Tensor]
    scale: Tensor
    zero: Tensor | None
    group: Tensor
    block: int = 1
    floating: bool = False

    def rows(self, start: int, stop: int) -> Tensor:
        """start: a multiple of 8, which AWQ has in a word."""
        values, blocks = self.steps(start, stop), torch.arange(start, stop, device=self.scale.device) // self.block
        values = e4m3(values) if self.floating else values.float()
        if self.zero is not None:
            values -= self.zero[blocks].index_select(1, self.group)
        return values.mul_(self.scale[blocks].float().index_select(1, self.group))

    def packed(self, layout: StepLayout, rows: int) -> PackedMatrix:
        """In groups of the layout, which lie within its own. Steps of eight bits that are not signed become so."""
        blocks, first = torch.arange(rows, device=self.scale.device) // self.block, self.group[:: layout.group]
        steps, zero = self.steps(0, rows), self.zero
        scale = self.scale[blocks].index_select(1, first).contiguous()
        if layout.steps == "int8" and steps.dtype == torch.uint8:
            steps, zero = (steps ^ 128).view(torch.int8), None if zero is None else zero - 128
        least = zero[blocks].index_select(1, first).to(torch.int8) if layout.least and zero is not None else None
        return PackedMatrix(layout, steps.contiguous(), scale, None, least)


def grid(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    """parts: by the last part of their names. Raises ValueError for numbers that cannot be."""
    match packing:
        case Scaled():
            return scaled(packing, parts, shape)
        case Int32Words():
            return words(packing, parts, shape)
        case Awq():
            return awq(packing, parts, shape)
        case Gptq():
            return gptq(packing, parts, shape)


def scaled(packing: Scaled, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    weight, scale = parts["weight"], parts[packing.scale]
    columns = packing.columns or shape[1]

    def steps(start: int, stop: int) -> Tensor:
        piece = weight[start:stop]
        return piece.view(torch.uint8) if packing.floating else piece

    by_rows = scale.reshape(-1, -(-shape[1] // columns))
    group = torch.arange(shape[1], device=scale.device) // columns
    return Grid(steps, by_rows, None, group, packing.rows or shape[0], floating=packing.floating)


def words(packing: Int32Words, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    told = parts.get("weight_shape")
    if told is not None and told.tolist() != [*shape]:
        raise ValueError(f"weight_shape says {told.tolist()}, and its words are {[*shape]}")
    packed, scale = parts["weight_packed"], parts["weight_scale"].reshape(shape[0], -1)
    middle = 1 << packing.bits - 1
    zero = torch.full_like(scale, middle, dtype=torch.float32)
    if packing.zeros:
        told = parts["weight_zero_point"]
        if told.dtype == torch.int8:
            zero = told.float() + middle
        else:
            zero = split(told.T, packing.bits)[:, : shape[0]].T.float()

    def steps(start: int, stop: int) -> Tensor:
        return split(packed[start:stop], packing.bits)

    return Grid(steps, scale, zero.contiguous(), groups(parts.get("weight_g_idx"), packing.group, shape[1], scale))


def awq(packing: Awq, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    by_outputs = parts["qweight"].T.contiguous()
    scale = parts["scales"].T.contiguous()
    zero = split(parts["qzeros"], packing.bits).view(scale.shape[1], -1, 8)[:, :, AWQ_ORDER].flatten(1)

    def steps(start: int, stop: int) -> Tensor:
        piece = by_outputs[start // 8 : -(-stop // 8)]
        eight = split(piece, packing.bits).view(*piece.shape, 8)[:, :, AWQ_ORDER]
        return eight.transpose(1, 2).flatten(0, 1)[: stop - start]

    return Grid(steps, scale, zero.T.float().contiguous(), groups(None, packing.group, shape[1], scale))


def gptq(packing: Gptq, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    """Zero points are counted round: in the older format, where 1 is added, 15 stands for 0."""
    by_outputs = parts["qweight"].T.contiguous()
    scale = parts["scales"].T.contiguous()
    zero = split(parts["qzeros"], packing.bits)[:, : shape[0]]
    zero = zero + packing.offset & (1 << packing.bits) - 1

    def steps(start: int, stop: int) -> Tensor:
        return split(by_outputs[start:stop], packing.bits)

    return Grid(steps, scale, zero.T.float().contiguous(), groups(parts.get("g_idx"), packing.group, shape[1], scale))


def groups(told: Tensor | None, size: int, columns: int, scale: Tensor) -> Tensor:
    """Of each column. told: by the file, where it has them."""
    if told is None:
        return torch.arange(columns, device=scale.device) // (size or columns)
    if not 0 <= int(told.min()) <= int(told.max()) < scale.shape[1]:
        raise ValueError(f"its groups of columns are {int(told.min())}..{int(told.max())}, of {scale.shape[1]}")
    return told.long()


def split(packed: Tensor, bits: int) -> Tensor:
    """The numbers in each row's words, those in the lowest bits first: uint8."""
    data = packed.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(1)
