"""Products with weights in FP8 whose rows of x are rounded to FP8 as well: which weights, and their launches.

Published FP8 folders with `activation_scheme` dynamic are made for this arithmetic. A row is rounded to E4M3 in groups
of 128 columns, each with its own scale, and a weight has a scale for each block of 128 x 128. The sum of a group is
computed by the tensor cores and multiplied with both scales; groups are added in float32, in order. Every kernel here
gives the same bits, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from attrs import define, frozen
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from adapters.checkpoint.packed_matrix import PackedMatrix
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper.fp8 import fp8_narrow, fp8_rows, fp8_wide
from adapters.models.kernels.triton_launch import launch

SIDE = 128  # rows and columns of a block, and columns of a group of a row
NARROW_FP8 = 64  # rows of x that are multiplied with weights as the tall operand
_HEIGHT = 64  # rows of w of a program of these
_RESERVED = 4 << 10  # bytes of shared memory for barriers and scales
_RING = 12  # groups of columns that memory holds in products of few rows
_E4M3 = torch.float8_e4m3fn


@frozen(eq=False)
class CudaFp8Matrix:
    """A weight in E4M3. codes: `[N, K]`. scales: float32 `[N / 128, K / 128]`. Of a gated weight the first half of the
    rows is the gate.
    """

    codes: Tensor
    scales: Tensor

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1]


@define
class Fp8Products:
    """Products in FP8 of one device. shared: bytes of shared memory that a program may have. hopper: its compute
    capability is 9.0; others have none.
    """

    device: torch.device
    processors: int
    shared: int
    pdl: bool | None
    hopper: bool

    def pack(self, parts: Sequence[PackedMatrix], dtype: torch.dtype) -> CudaFp8Matrix | None:
        """Copy parts to the device, one below the other. None: no kernel here is for them. dtype: of x."""
        if not self.hopper or dtype != torch.bfloat16:
            return None
        found = [scales for part in parts if (scales := find_block_scales(part)) is not None]
        if len(found) != len(parts):
            return None
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        codes = torch.empty(shape, dtype=torch.uint8, device=self.device)
        for target, part in zip(torch.split(codes, [part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part.steps)
        return CudaFp8Matrix(codes.view(_E4M3), torch.cat(found).to(self.device).contiguous())

    def multiply(self, x: Tensor, weight: CudaFp8Matrix, out: Tensor, *, gated: int) -> None:
        """Write x @ weight.T to out. gated: see `CudaWeight`."""
        if len(x) == 1 and (stages := self._count_row_stages(weight)) > 0:
            self.multiply_row(x, weight, out, stages, gated=gated)
            return
        codes, scales = quantise_rows(x, self.pdl)
        if len(x) <= NARROW_FP8:
            self.multiply_narrow(codes, scales, weight, out, gated=gated)
        else:
            self.multiply_wide(codes, scales, weight, out, gated=gated)

    def _count_row_stages(self, weight: CudaFp8Matrix) -> int:
        """Return how many groups of columns fit into shared memory beside a row. 0: too few."""
        groups = weight.columns // SIDE
        room = (self.shared - _RESERVED - groups * (8 * SIDE + 8)) // (_HEIGHT * SIDE)
        return min(groups, _RING, room) if room >= min(groups, 4) else 0

    def multiply_row(self, x: Tensor, weight: CudaFp8Matrix, out: Tensor, stages: int, *, gated: int) -> None:
        """Multiply one row that is not quantised yet."""
        sizes = {"GROUPS": weight.columns // SIDE, "STAGES": stages, "PER": 1, "GATED": gated}
        given = (describe_codes(weight.codes, _HEIGHT // 2), x, weight.scales, out, weight.outputs)
        launch(fp8_narrow.multiply_row, (weight.outputs // _HEIGHT,), *given, **sizes, **launch_options(4, self.pdl))

    def multiply_narrow(self, codes: Tensor, scales: Tensor, weight: CudaFp8Matrix, out: Tensor, *, gated: int) -> None:
        count = len(codes)
        width = max(8, min(round_up_to_power(count), NARROW_FP8))
        grid = (weight.outputs // _HEIGHT, count_parts(count, width))
        groups = weight.columns // SIDE
        sizes = (count, weight.outputs, groups, scales.stride(0), out.stride(0))
        given = (describe_codes(weight.codes, _HEIGHT // 2), describe_codes(codes, width), scales, weight.scales, out)
        constants = {"STAGES": min(_RING, groups), "GATED": gated}
        launch(fp8_narrow.multiply_narrow, grid, *given, *sizes, **constants, **launch_options(4, self.pdl))

    def multiply_wide(self, codes: Tensor, scales: Tensor, weight: CudaFp8Matrix, out: Tensor, *, gated: int) -> None:
        count = len(codes)
        rows = self._choose_wide_rows(count, weight.outputs)
        tiles = count_parts(count, rows) * (weight.outputs // SIDE)
        apart = weight.outputs // 2 if gated else _HEIGHT
        sizes = (count, weight.outputs, weight.columns // SIDE, apart, scales.stride(0), out.stride(0))
        given = (describe_codes(codes, rows), describe_codes(weight.codes, _HEIGHT), scales, weight.scales, out)
        constants = {"STAGES": 4 if rows == 256 else 6, "GROUP": 8, "GATED": gated}
        grid = (min(self.processors, tiles),)
        launch(fp8_wide.multiply_wide, grid, *given, *sizes, **constants, **launch_options(4, self.pdl))

    def _choose_wide_rows(self, count: int, outputs: int) -> int:
        """Choose the rows of x of a tile: as many as leave work for every processor."""
        return 256 if count_parts(count, 256) * (outputs // SIDE) >= self.processors else 128


def find_block_scales(matrix: PackedMatrix) -> Tensor | None:
    """Return the scales of the blocks of a matrix, float32 `[N / 128, K / 128]`; None: it is not in such blocks, or its
    rows of x are not to be rounded.
    """
    layout = matrix.layout
    (rows, columns) = matrix.shape
    if not layout.rounds_rows or layout.steps != "e4m3" or layout.group != SIDE or rows % SIDE or columns % SIDE:
        return None
    by_blocks = matrix.scale.float().view(rows // SIDE, SIDE, columns // SIDE)
    first = by_blocks[:, 0]
    return first if bool((by_blocks == first[:, None]).all()) else None


def quantise_rows(x: Tensor, pdl: bool | None) -> tuple[Tensor, Tensor]:
    """Return rows in E4M3, and the scales of their groups, float32 `[K / 128, rows or more]`."""
    (count, columns) = x.shape
    warps = 4
    codes = x.new_empty(count, columns, dtype=_E4M3)
    scales = x.new_empty(columns // SIDE, count_parts(count, 4) * 4, dtype=torch.float32)
    grid = (count, count_parts(columns // SIDE, 4 * warps))
    sizes = (columns, x.stride(0), scales.stride(0))
    launch(fp8_rows.quantise_rows, grid, x, codes, scales, *sizes, **launch_options(warps, pdl))
    return codes, scales


def describe_codes(codes: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor by which bulk copies bring a group of columns of so many rows."""
    return TensorDescriptor.from_tensor(codes, [rows, SIDE], _code_layout(rows))


@cache
def _code_layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, SIDE], gl.float8e4nv)
