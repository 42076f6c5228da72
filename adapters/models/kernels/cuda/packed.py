"""Packed weights on CUDA: which stay so, how they lie on the device, and what multiplies with them.

Few rows are multiplied by kernels that unpack in registers. For many rows it is cheaper to unpack a part of the weight
once, into memory that the next part takes again, and to multiply with that as with any weight. Both sum alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental.gluon import language as gl

from adapters.checkpoint.packed_matrix import PackedMatrix, Stack, StepLayout
from adapters.models.kernels.cuda.attention import launching
from adapters.models.kernels.cuda.tiles import parts
from adapters.models.kernels.interface import NARROW
from adapters.models.kernels.packed_formats import block_of, served
from adapters.models.kernels.triton import packed
from adapters.models.kernels.triton.launch import launch
from adapters.models.kernels.triton.packed_numbers import BlockForm

SCRATCH_BYTES = 128 << 20  # of unpacked weights: all of one, or pieces that are enough work for every processor
_WIDEST = 256  # columns of a tile of the products
_PIECE = 1 << 24  # steps rearranged at once
_SIDE = 8  # rows that lie side by side
_ROOMY = 160 << 10  # bytes of shared memory
_CONVERTS = (8, 9)  # compute capability from which E4M3 has instructions
_LARGEST = 2.0**7  # of E4M3's scales, which are kept 2 ** 120 times as great without them
_NUMBERS = {"float16": gl.float16, "bfloat16": gl.bfloat16, "float32": gl.float32}
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_HELD = {16: torch.int16, 32: torch.int32, 64: torch.int64}


@frozen(eq=False)
class CudaSteps:
    """A packed matrix as `kernels/triton/packed` reads it. columns: of x; there may be zeros behind them."""

    layout: StepLayout
    outputs: int
    columns: int
    words: Tensor
    scale: Tensor
    inner: Tensor | None
    least: Tensor | None
    own: Tensor | None
    converts: bool

    @property
    def blocks(self) -> int:
        return self.words.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """What it has not is never read."""
        levels = (self.scale, self.inner, self.least, self.own)
        return [self.words, *(self.words if one is None else one for one in levels)]

    @property
    def form(self) -> BlockForm:
        own, scale = self.layout, _NUMBERS[self.layout.scale]
        levels = (own.group, own.span, scale, own.inner, own.least)
        return BlockForm(own.steps, block_of(own), *levels, self.converts)


@frozen(eq=False)
class CudaStack:
    """A weight of parts, one below the other, at least one of them packed; gated: of one, gates and what they gate in
    turn. widths: outputs of each part.
    """

    parts: tuple[Any, ...]
    widths: tuple[int, ...]
    gated: bool = False


class Multiply(Protocol):
    """With a weight that is not packed, `[N, K]`."""

    def __call__(self, x: Tensor, w: Tensor, out: Tensor, *, gated: bool) -> None: ...


@define(eq=False)
class CudaPacking:
    """processors, shared, pdl: as everywhere. What is kept of its own is kept for good, since recorded graphs hold its
    address.
    """

    device: torch.device
    processors: int
    shared: int
    pdl: bool | None
    _scratch: Tensor | None = field(init=False, default=None)

    def stacked(self, stack: Stack, plain: Callable[[Tensor], Any]) -> CudaStack | None:
        """None where it is to be unpacked. plain: packs a part that is not packed."""
        joined = stack.joined()
        parts = [self._packed(part, stack.dtype) if isinstance(part, PackedMatrix) else None for part in joined.parts]
        if all(part is None for part in parts):
            return None
        pairs = zip(parts, joined.parts, strict=True)
        filled = (plain(joined.plain(part)) if own is None else own for own, part in pairs)
        return CudaStack(tuple(filled), tuple(part.shape[0] for part in joined.parts))

    def gating(self, stack: Stack) -> CudaStack | None:
        """The same of what gates, and what is gated: both packed alike."""
        gate, up = stack.parts
        if not isinstance(gate, PackedMatrix) or not isinstance(up, PackedMatrix) or gate.layout != up.layout:
            return None
        pairs = zip(gate.tensors, up.tensors, strict=True)
        both = (None if one is None or two is None else torch.stack((one, two), 1).flatten(0, 1) for one, two in pairs)
        own = self._packed(PackedMatrix(gate.layout, *both), stack.dtype)  # type: ignore[arg-type]
        return None if own is None else CudaStack((own,), (own.outputs,), gated=True)

    def _packed(self, matrix: PackedMatrix, dtype: torch.dtype) -> CudaSteps | None:
        if not served(matrix.layout, matrix.shape[1], dtype):
            return None
        if self._scratch is None:
            self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)
        return steps_of(matrix, self.device)

    def multiply(self, x: Tensor, weight: CudaStack, plain: Multiply) -> Tensor:
        share = 2 if weight.gated else 1
        out, at = x.new_empty(len(x), sum(weight.widths) // share), 0
        for part, width in zip(weight.parts, weight.widths, strict=True):
            columns = out[:, at : at + width // share]
            if not isinstance(part, CudaSteps):
                plain(x, part.weight, columns, gated=False)
            elif len(x) <= NARROW:
                tile = choose_packed_tile(len(x), part.outputs, self.processors, self.shared)
                multiply_narrow(x, part, columns, tile, gated=weight.gated, pdl=self.pdl)
            else:
                self._multiply_wide(x, part, columns, plain, gated=weight.gated)
            at += width // share
        return out

    def _multiply_wide(self, x: Tensor, weight: CudaSteps, out: Tensor, plain: Multiply, *, gated: bool) -> None:
        assert self._scratch is not None
        share = 2 if gated else 1
        whole = self._scratch.view(x.dtype)
        pieces = triton.cdiv(weight.outputs, len(whole) // weight.columns // _WIDEST * _WIDEST)
        most = triton.cdiv(weight.outputs, pieces * _WIDEST) * _WIDEST
        for first in range(0, weight.outputs, most):
            stop = min(first + most, weight.outputs)
            part = whole[: (stop - first) * weight.columns].view(stop - first, weight.columns)
            unpack(weight, first, part, self.pdl)
            plain(x, part, out[:, first // share : stop // share], gated=gated)


def steps_of(matrix: PackedMatrix, device: torch.device) -> CudaSteps | None:
    """Of one that is served; None for scales that are too great."""
    layout, (rows, columns), scale = matrix.layout, matrix.shape, matrix.scale
    converts = layout.steps == "e4m3" and torch.cuda.get_device_capability(device) >= _CONVERTS
    if layout.steps == "e4m3":
        if float(scale.abs().max()) > _LARGEST:
            return None
        layout, scale = evolve(layout, scale="float32"), scale.float() * (1.0 if converts else 2.0**120)
    block, step = block_of(layout), max(1, _PIECE // columns // _SIDE)
    words = torch.empty(-(-rows // _SIDE), -(-columns // block), 128, dtype=torch.int32, device=device)
    for first in range(0, len(words), step):
        piece = matrix.steps[first * _SIDE : (first + step) * _SIDE].to(device)
        words[first : first + step].copy_(words_of(piece, layout))

    def levels(one: Tensor | None, group: int) -> Tensor | None:
        return None if one is None else _levels(one.to(device), group, block, words.shape[1])

    scales = levels(scale, layout.span)
    assert scales is not None
    inner, least = levels(matrix.inner, layout.group), levels(matrix.least, layout.group)
    return CudaSteps(layout, rows, columns, words, scales, inner, least, levels(matrix.own, layout.span), converts)


def words_of(steps: Tensor, layout: StepLayout) -> Tensor:
    """`[rows, K]` -> int32 `[rows / 8, K / block, 128]`, filled up with zeros: of each of eight rows, of each of four
    lanes, four words. Word c of lane t has, of the block's columns from c * block / 4 on, of each 16 in ascending bits
    2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    """
    block, (rows, columns) = block_of(layout), steps.shape
    steps = pad(steps.view(torch.uint8), (0, -columns % block, 0, -rows % _SIDE))
    if layout.steps == "int8":
        steps = steps ^ 128
    each = block // 16
    lanes = steps.view(-1, _SIDE, steps.shape[1] // block, 4, each // 4, 2, 4, 2)  # ..., word, 16, half, lane, pair
    lanes = lanes.permute(0, 2, 1, 6, 3, 4, 5, 7).reshape(len(lanes), -1, 128, each)
    if each == 8:
        lanes = lanes[..., 0::2] | lanes[..., 1::2] << 4
    return lanes.contiguous().view(torch.int32).squeeze(-1)


def _levels(one: Tensor, group: int, block: int, blocks: int) -> Tensor:
    """`[rows / 8, numbers, 8]`: those of a block's groups in one number, so that one load has them, and whole numbers
    then 128 greater. Groups of 16 of 128 columns are in two: the first halves of all words, and the second ones.
    """
    held = block // group
    if held > 1:
        one = pad(one.view(_WHOLE[one.itemsize]), (0, blocks * held - one.shape[1]))
        one = one ^ -128 if one.dtype == torch.int8 else one
        if held == 8:
            one, held = one.view(len(one), -1, 4, 2).transpose(2, 3).flatten(1), 4
        one = one.contiguous().view(_HELD[held * one.itemsize * 8])
    one = pad(one, (0, 0, 0, -len(one) % _SIDE))
    return one.view(len(one) // _SIDE, _SIDE, -1).transpose(1, 2).contiguous()


@frozen
class PackedTile:
    """Rows of x and of the weight that a program has, columns of both that are loaded at once, its warps, and how many
    such chunks it has room for: an even number.
    """

    rows: int
    columns: int
    chunk: int
    warps: int = 4
    stages: int = 4


def choose_packed_tile(count: int, outputs: int, processors: int, shared: int) -> PackedTile:
    """shared: bytes of shared memory that a program may have.

    A product takes no less than its chain over the columns, so programs are small: 4,096 outputs of 32 a program are
    about one for each processor, and there is room for those of some more rows beside them. Where there are many
    outputs anyway, 64 read less of x, and more rows unpack less often. All but one tile need no more than 99 KiB, what
    the smallest GPUs have.
    """
    many = outputs >= 96 * processors
    if count <= 16 or (count <= 64 and not many):
        return PackedTile(16, 64, 128) if many else PackedTile(16, 32, 256)
    return PackedTile(32, 64, 256, warps=8) if count <= 32 and shared >= _ROOMY else PackedTile(64, 64, 128)


def multiply_narrow(
    x: Tensor, weight: CudaSteps, out: Tensor, tile: PackedTile, *, gated: bool, pdl: bool | None
) -> None:
    grid = (parts(weight.outputs, tile.columns), parts(len(x), tile.rows))
    sizes = (len(x), weight.outputs, weight.columns, weight.blocks, out.stride(0))
    constants = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "CHUNK": tile.chunk,
        "STAGES": tile.stages,
        "FORM": weight.form,
        "GATED": gated,
    }
    launch(packed.packed_narrow, grid, *weight.tensors, x, out, *sizes, **constants, **launching(tile.warps, pdl))


def unpack(weight: CudaSteps, first: int, out: Tensor, pdl: bool | None) -> None:
    """As many rows as out has, rounded to what it is of."""
    grid = (triton.cdiv(len(out), 64), weight.blocks)
    sizes = (first, first + len(out), weight.columns, weight.blocks)
    launch(packed.unpack, grid, *weight.tensors, out, *sizes, BLOCK_N=64, FORM=weight.form, **launching(4, pdl))
