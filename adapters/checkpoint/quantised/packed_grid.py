"""Unpacks packed matrices: a weight is `(step - zero point) * scale` in float32, which is rounded once.

A step has at most 8 significant bits, and a scale in float16 or bfloat16 at most 11. With these nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, decode_e4m3
from adapters.checkpoint.quantised.quantisation_config import Awq, Gptq, Int32Words, Packing, ScaledBlocks

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The position in a word of the first of eight outputs, of the second, and so on."""


@frozen
class Grid:
    """A packed matrix `[outputs, inputs]` in one form for all packings.

    read_steps: returns the steps of the rows `[start, stop)`, as integers or as bytes of E4M3.
    scale: the stored scale of each block of `block` rows and each group of columns.
    zero: the zero points, float32, like the scale.
    group_of_column: the group of each column.
    """

    read_steps: Callable[[int, int], Tensor]
    scale: Tensor
    zero: Tensor | None
    group_of_column: Tensor
    block: int = 1
    floating: bool = False

    def unpack_rows(self, start: int, stop: int) -> Tensor:
        """Return the weights of the rows `[start, stop)`, float32. start: a multiple of 8, as AWQ packs 8 in a word."""
        values = self.read_steps(start, stop)
        blocks = torch.arange(start, stop, device=self.scale.device) // self.block
        values = decode_e4m3(values) if self.floating else values.float()
        if self.zero is not None:
            values -= self.zero[blocks].index_select(1, self.group_of_column)
        return values.mul_(self.scale[blocks].float().index_select(1, self.group_of_column))

    def to_packed(self, layout: StepLayout, rows: int) -> PackedMatrix:
        """Return the matrix in a packed layout, whose groups lie within its own. Unsigned 8-bit steps become signed."""
        blocks = torch.arange(rows, device=self.scale.device) // self.block
        first = self.group_of_column[:: layout.group]
        steps = self.read_steps(0, rows)
        zero = self.zero
        scale = self.scale[blocks].index_select(1, first).contiguous()
        if layout.steps == "int8" and steps.dtype == torch.uint8:
            steps = (steps ^ 128).view(torch.int8)
            zero = None if zero is None else zero - 128
        least = zero[blocks].index_select(1, first).to(torch.int8) if layout.least and zero is not None else None
        return PackedMatrix(layout, steps.contiguous(), scale, None, least)


def build_grid(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    """Build the grid of a packed matrix. Raises ValueError for impossible numbers.

    parts: its stored tensors, by the last part of their names.
    """
    match packing:
        case ScaledBlocks():
            return build_scaled_grid(packing, parts, shape)
        case Int32Words():
            return build_words_grid(packing, parts, shape)
        case Awq():
            return build_awq_grid(packing, parts, shape)
        case Gptq():
            return build_gptq_grid(packing, parts, shape)


def build_scaled_grid(packing: ScaledBlocks, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    weight = parts["weight"]
    scale = parts[packing.scale]
    columns = packing.columns or shape[1]

    def steps(start: int, stop: int) -> Tensor:
        piece = weight[start:stop]
        return piece.view(torch.uint8) if packing.floating else piece

    by_rows = scale.reshape(-1, -(-shape[1] // columns))
    group = torch.arange(shape[1], device=scale.device) // columns
    return Grid(steps, by_rows, None, group, packing.rows or shape[0], floating=packing.floating)


def build_words_grid(packing: Int32Words, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    stated = parts.get("weight_shape")
    if stated is not None and stated.tolist() != [*shape]:
        raise ValueError(f"weight_shape says {stated.tolist()}, and its words are {[*shape]}")
    packed = parts["weight_packed"]
    scale = parts["weight_scale"].reshape(shape[0], -1)
    middle = 1 << packing.bits - 1
    zero = torch.full_like(scale, middle, dtype=torch.float32)
    if packing.zeros:
        points = parts["weight_zero_point"]
        if points.dtype == torch.int8:
            zero = points.float() + middle
        else:
            zero = split_words(points.T, packing.bits)[:, : shape[0]].T.float()

    def steps(start: int, stop: int) -> Tensor:
        return split_words(packed[start:stop], packing.bits)

    return Grid(
        steps, scale, zero.contiguous(), find_column_groups(parts.get("weight_g_idx"), packing.group, shape[1], scale)
    )


def build_awq_grid(packing: Awq, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    by_outputs = parts["qweight"].T.contiguous()
    scale = parts["scales"].T.contiguous()
    zero = split_words(parts["qzeros"], packing.bits).view(scale.shape[1], -1, 8)[:, :, AWQ_ORDER].flatten(1)

    def steps(start: int, stop: int) -> Tensor:
        piece = by_outputs[start // 8 : -(-stop // 8)]
        eight = split_words(piece, packing.bits).view(*piece.shape, 8)[:, :, AWQ_ORDER]
        return eight.transpose(1, 2).flatten(0, 1)[: stop - start]

    return Grid(steps, scale, zero.T.float().contiguous(), find_column_groups(None, packing.group, shape[1], scale))


def build_gptq_grid(packing: Gptq, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Grid:
    """Build the grid of GPTQ. Zero points wrap around: in the older format, where 1 is added, 15 stands for 0."""
    by_outputs = parts["qweight"].T.contiguous()
    scale = parts["scales"].T.contiguous()
    zero = split_words(parts["qzeros"], packing.bits)[:, : shape[0]]
    zero = zero + packing.offset & (1 << packing.bits) - 1

    def steps(start: int, stop: int) -> Tensor:
        return split_words(by_outputs[start:stop], packing.bits)

    return Grid(
        steps,
        scale,
        zero.T.float().contiguous(),
        find_column_groups(parts.get("g_idx"), packing.group, shape[1], scale),
    )


def find_column_groups(stored: Tensor | None, size: int, columns: int, scale: Tensor) -> Tensor:
    """Return the group of each column. stored: the groups that the file holds, or None. Raises ValueError."""
    if stored is None:
        return torch.arange(columns, device=scale.device) // (size or columns)
    if not 0 <= int(stored.min()) <= int(stored.max()) < scale.shape[1]:
        raise ValueError(f"its groups of columns are {int(stored.min())}..{int(stored.max())}, of {scale.shape[1]}")
    return stored.long()


def split_words(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers in the words of each row, lowest bits first, as uint8."""
    data = packed.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(1)
