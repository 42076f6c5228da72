"""Products with weights in FP8 whose rows of x are rounded to FP8 as well: which weights, and their launches.

Published FP8 folders with `activation_scheme` dynamic are made for this arithmetic. A row is rounded to E4M3 in groups
of 128 columns, each with its own scale, and a weight has a scale for each block of 128 x 128. The sum of a group is
computed by the tensor cores and multiplied with both scales; groups are added in float32, in order. Every kernel here
gives the same bits, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

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
LEAST = 8  # columns of an instruction, at least
_RESERVED = 2 << 10  # bytes of shared memory for barriers, and what each program takes besides
_MOST_PROGRAMS = 3  # that a processor has at a time
_E4M3 = torch.float8_e4m3fn


@frozen(eq=False)
class CudaFp8Matrix:
    """A weight in E4M3. codes: `[N, K]`. scales: float32 `[N / 128, K / 128]`.

    halves: 2: 64 rows of a gate and 64 of what it gates lie in turn in codes, and their scales one below the other.
    Else 1.
    """

    codes: Tensor
    scales: Tensor
    halves: int = 1

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1]

    @property
    def apart(self) -> int:
        """The rows between the scales of a gate and those of what it gates; within half a block anywhere else."""
        return self.outputs // 2 if self.halves == 2 else _HEIGHT // 2


@frozen
class NarrowTile:
    """Rows of x of a program, instructions' columns that it multiplies at once, groups that such a one has, and how
    often shared memory has so many. With two groups, a program has 32 rows of the weight instead of 64.
    """

    rows: int
    at_once: int
    groups: int
    stages: int


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

    def pack(self, matrix: PackedMatrix, dtype: torch.dtype) -> CudaFp8Matrix | None:
        """Copy a matrix to the device. None: no kernel here is for it. dtype: of x."""
        scales = self._find_scales((matrix,), dtype)
        return None if scales is None else CudaFp8Matrix(self._copy_codes((matrix,)).flatten(0, 2), scales)

    def pack_gated(self, gate: PackedMatrix, up: PackedMatrix, dtype: torch.dtype) -> CudaFp8Matrix | None:
        """Copy a gate and what it gates to the device. None: no kernel here is for them. dtype: of x."""
        scales = self._find_scales((gate, up), dtype)
        return None if scales is None else CudaFp8Matrix(self._copy_codes((gate, up)).flatten(0, 2), scales, 2)

    def _find_scales(self, parts: Sequence[PackedMatrix], dtype: torch.dtype) -> Tensor | None:
        if not self.hopper or dtype != torch.bfloat16:
            return None
        found = [scales for part in parts if (scales := find_block_scales(part)) is not None]
        return torch.cat(found).to(self.device).contiguous() if len(found) == len(parts) else None

    def _copy_codes(self, parts: Sequence[PackedMatrix]) -> Tensor:
        """Return codes `[N / 64, parts, 64, K]`."""
        (rows, columns) = parts[0].shape
        codes = torch.empty(rows // _HEIGHT, len(parts), _HEIGHT, columns, dtype=torch.uint8, device=self.device)
        for number, part in enumerate(parts):
            codes[:, number].copy_(part.steps.reshape(-1, _HEIGHT, columns))
        return codes.view(_E4M3)

    def multiply(self, x: Tensor, weight: CudaFp8Matrix, out: Tensor, *, gated: int) -> None:
        """Write x @ weight.T to out. gated: see `CudaWeight`."""
        tile = self.choose_narrow_tile(len(x), weight)
        if len(x) == 1 and tile is not None:
            self.multiply_row(x, weight, out, tile, gated=gated)
            return
        codes, scales = quantise_rows(x, self.pdl)
        if tile is not None:
            self.multiply_narrow(codes, scales, weight, out, tile, gated=gated)
        else:
            self.multiply_wide(codes, scales, weight, out, gated=gated)

    def choose_narrow_tile(self, count: int, weight: CudaFp8Matrix) -> NarrowTile | None:
        """Choose the tile of a product of few rows. None: there are too many, or shared memory is too small for it.

        A program that multiplies two instructions' columns at once waits less often, if memory has room for more.
        """
        has_few_outputs = 4 * (weight.outputs // SIDE) <= self.processors
        if count > NARROW_FP8 * (2 if has_few_outputs else 1):
            return None
        groups = weight.columns // SIDE
        programs = weight.outputs // _HEIGHT
        of_tile = 2 if weight.halves == 1 and programs < self.processors and groups % 2 == 0 else 1
        least = LEAST // of_tile
        rows = least if count == 1 else max(least, min(round_up_to_power(count), NARROW_FP8))
        whole = groups * (least * SIDE + 8 if count == 1 else 8 * rows)  # a row of x, and scales
        most = min(_MOST_PROGRAMS, count_parts(programs * of_tile, self.processors))
        for sharing, at_once in product(range(most, 0, -1), (2, 1)):
            steps = groups // (at_once * of_tile)
            each = at_once * SIDE * (_HEIGHT + (0 if count == 1 else of_tile * rows))
            stages = min(steps, (self.shared // sharing - _RESERVED - whole) // each)
            if steps * at_once * of_tile == groups and stages >= min(2, steps):
                return NarrowTile(rows, at_once, of_tile, stages)
        return None

    def multiply_row(self, x: Tensor, weight: CudaFp8Matrix, out: Tensor, tile: NarrowTile, *, gated: int) -> None:
        """Multiply one row that is not quantised yet."""
        given = (describe_tall(weight, tile), x, weight.scales, out, weight.apart)
        constants = {"GROUPS": weight.columns // SIDE, "STAGES": tile.stages, "GATED": gated}
        grid = (weight.outputs * tile.groups // _HEIGHT,)
        launch(fp8_narrow.multiply_row, grid, *given, **constants, **launch_options(4, self.pdl))

    def multiply_narrow(
        self, codes: Tensor, scales: Tensor, weight: CudaFp8Matrix, out: Tensor, tile: NarrowTile, *, gated: int
    ) -> None:
        """Multiply rows that are quantised with a weight that is the tall operand."""
        count = len(codes)
        grid = (weight.outputs * tile.groups // _HEIGHT, count_parts(count, tile.rows))
        sizes = (count, weight.apart, scales.stride(0), out.stride(0))
        given = (describe_tall(weight, tile), describe_flat(codes, tile), scales, weight.scales, out)
        constants = {"GROUPS": weight.columns // SIDE, "STAGES": tile.stages, "GATED": gated}
        launch(fp8_narrow.multiply_narrow, grid, *given, *sizes, **constants, **launch_options(4, self.pdl))

    def multiply_wide(self, codes: Tensor, scales: Tensor, weight: CudaFp8Matrix, out: Tensor, *, gated: int) -> None:
        """Multiply rows that are quantised, in tiles of many rows."""
        count = len(codes)
        rows = self._choose_wide_rows(count, weight.outputs)
        tiles = count_parts(count, rows) * (weight.outputs // SIDE)
        sizes = (count, weight.outputs, weight.columns // SIDE, weight.apart, scales.stride(0), out.stride(0))
        given = (describe_codes(codes, rows), describe_codes(weight.codes, SIDE), scales, weight.scales, out)
        constants = {"STAGES": 4 if rows == 256 else 6, "GROUP": 8, "GATED": gated}
        grid = (min(self.processors, tiles),)
        launch(fp8_wide.multiply_wide, grid, *given, *sizes, **constants, **launch_options(4, self.pdl))

    def _choose_wide_rows(self, count: int, outputs: int) -> int:
        """Choose the rows of x of a tile. One of 256 takes 1.75 times as long as one of 128."""
        rounds = {
            rows: count_parts(count_parts(count, rows) * (outputs // SIDE), self.processors) for rows in (128, 256)
        }
        return 256 if 7 * rounds[256] <= 4 * rounds[128] else 128


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
    return _describe(codes, (rows, SIDE))


def describe_tall(weight: CudaFp8Matrix, tile: NarrowTile) -> TensorDescriptor:
    """Return a descriptor by which bulk copies bring a tile of a weight, as `multiply_narrow` has it."""
    if tile.groups == 2:
        tiles = weight.codes.view(-1, 8, weight.columns // (2 * SIDE), 2, SIDE).permute(2, 0, 3, 1, 4)
        return _describe(tiles, (tile.at_once, 4, 2, 8, SIDE))
    tiles = weight.codes.view(-1, _HEIGHT, weight.columns // SIDE, SIDE).permute(2, 0, 1, 3)
    return _describe(tiles, (tile.at_once, weight.halves, _HEIGHT // weight.halves, SIDE))


def describe_flat(codes: Tensor, tile: NarrowTile) -> TensorDescriptor:
    """Return a descriptor by which bulk copies bring the same groups of columns of a tile's rows of x."""
    if tile.groups == 2:
        return _describe(codes.view(len(codes), -1, 2, SIDE).permute(1, 0, 2, 3), (tile.at_once, tile.rows, 2, SIDE))
    return _describe(codes.view(len(codes), -1, SIDE).permute(1, 0, 2), (tile.at_once, tile.rows, SIDE))


def _describe(codes: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes, [*box], _code_layout(*box))


@cache
def _code_layout(*box: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([*box], gl.float8e4nv)
